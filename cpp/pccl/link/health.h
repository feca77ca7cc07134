// Heartbeats, silence, and links that cannot be established.
#pragma once

#include "pccl/link/stand_ins.h"

namespace pccl::link {

// *one thread: the engine's*
class Health {
 public:
  Health(LinkFacts& facts, StandIns& stand_ins) : facts_(facts), stand_ins_(stand_ins) {}

  void on_watch(const LinkContext& context);
  // Notes which links and stripes received bytes, and queues heartbeats. Call at each tick.
  void listen();

 private:
  void watch_connecting(Link& link);
  void watch_up(Link& link);
  void listen(Link& link);
  [[nodiscard]] const char* fault_of(const Link& link) const;

  LinkFacts& facts_;
  StandIns& stand_ins_;
};

}  // namespace pccl::link
