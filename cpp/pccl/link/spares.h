// How many stripes each link has: dials those that are missing, and measures whether more help.
#pragma once

#include <cstdint>

#include "pccl/link/dialler.h"
#include "pccl/link/stand_ins.h"

namespace pccl::link {

// *one thread: the engine's*
class Spares {
 public:
  Spares(LinkFacts& facts, Dialler& dialler, StandIns& stand_ins)
      : facts_(facts), dialler_(dialler), stand_ins_(stand_ins) {}

  // Dials the stripes that are missing, and replaces those that have ended. While nothing is heard
  // on the link, one for each call.
  void dial_spares(Link& link);
  // The other end, which cannot dial, requests stripes.
  [[nodiscard]] Status on_wanted(Link& link, std::uint32_t count);
  // A stripe after the first is up. If nothing was heard on the link for long, its path was cut and
  // works again, and the stripes on it wait for TCP. The end that accepts them ends them, and the
  // other one follows.
  void on_new_stripe(Link& link, std::uint64_t id);
  // Measures the link's rate with its present stripes, and changes their number.
  void tune(Link& link);

 private:
  void ask_for_stripes(Link& link);

  LinkFacts& facts_;
  Dialler& dialler_;
  StandIns& stand_ins_;
};

}  // namespace pccl::link
