// Waking a thread from a signal handler.
#pragma once

#include <memory>

namespace pccl::os {

// Counts its rings. Not shared with forked children.
class Bell {
 public:
  // Throws std::system_error if the system has no room for one.
  Bell();
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Ends one wait, a later one if nobody waits now. Safe in a signal handler. *any thread*
  void ring();
  // Blocks until a ring that ended no other wait. *any thread*
  void wait();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace pccl::os
