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
  // on the link, some for each call.
  void dial_spares(Link& link);
  // The other end, which cannot dial, requests stripes.
  [[nodiscard]] Status on_wanted(Link& link, std::uint32_t count);
  // A stripe that this end has dialled is up. If the link was silent, its path works again.
  void on_answered(Link& link);
  // Ends stripes on which nothing is heard while a newer one works: they wait for TCP. The end that
  // accepts stripes does so when a new one is up and at each tick, and the other one follows.
  void end_stalled(Link& link);
  // Measures the link's rate with its present stripes, and changes their number.
  void tune(Link& link);

 private:
  [[nodiscard]] std::size_t searches(const Link& link, std::size_t wanted) const;
  void ask_for_stripes(Link& link);

  LinkFacts& facts_;
  Dialler& dialler_;
  StandIns& stand_ins_;
};

}  // namespace pccl::link
