// What is still open when the process ends through exit() is closed: peers see a departure and not
// a loss, and no thread of ours runs while statics are destroyed.
#pragma once

namespace pccl::capi {

// *any thread*
class ClosedAtExit {
 public:
  ClosedAtExit(const ClosedAtExit&) = delete;
  ClosedAtExit& operator=(const ClosedAtExit&) = delete;
  // Does nothing on a forked copy.
  virtual void close() = 0;

 protected:
  ClosedAtExit() = default;
  ~ClosedAtExit() = default;
  // To be called when the object is complete, and before it is no more: while it is being closed,
  // the latter waits.
  void opened();
  void gone();
};

}  // namespace pccl::capi
