// Closes open handles when the process ends through exit(): other peers see a
// departure and not a loss, and no thread of the library runs while static
// objects are destroyed.
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
  // Call opened() when the object is complete, and gone() before its end.
  // gone() waits while the object is being closed.
  void opened();
  void gone();
};

}  // namespace pccl::capi
