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

  // Dials the stripes that are missing, and replaces those that have ended.
  void dial_spares(Link& link);
  // The other end, which cannot dial, requests stripes.
  [[nodiscard]] Status on_wanted(Link& link, std::uint32_t count);
  // Measures the link's rate with its present stripes, and changes their number.
  void tune(Link& link);

 private:
  void ask_for_stripes(Link& link);

  LinkFacts& facts_;
  Dialler& dialler_;
  StandIns& stand_ins_;
};

}  // namespace pccl::link
