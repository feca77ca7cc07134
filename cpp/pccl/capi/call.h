// The frame of every function of pccl.h: exceptions become results, and the
// last failure is kept for pcclGetLastError.
#pragma once

#include <pthread.h>

#include <exception>
#include <new>
#include <string>
#include <utility>

#include "pccl.h"
#include "pccl/base/error.h"
#include "pccl/base/results.h"

namespace pccl::capi {

// Keeps the failure as the calling thread's last one, and returns its result.
// Allocates nothing.
pcclResult_t fail(const char* function, CallKind kind, const Error& error) noexcept;

[[nodiscard]] const char* last_error() noexcept;

// Delays the cancellation of a thread to the call's end, so that it does not
// leave the engine in the middle of its work.
class Inside {
 public:
  Inside() {
    ++depth();
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_);
  }
  ~Inside() {
    pthread_setcancelstate(before_, nullptr);
    --depth();
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  // Whether the calling thread is in a call: true in a signal handler that has
  // interrupted one.
  [[nodiscard]] static bool here() { return depth() > 0; }

 private:
  static int& depth() {
    thread_local int calls = 0;
    return calls;
  }
  int before_ = 0;
};

// Runs `body`, which returns a Status.
template <class Body>
pcclResult_t call(const char* function, CallKind kind, const Body& body) noexcept {
  const Inside inside;
  try {
    const Status status = body();
    return status ? pcclSuccess : fail(function, kind, status.error());
  } catch (const std::bad_alloc&) {
    return fail(function, kind, {Code::internal_error, "out of memory"});
  } catch (const std::exception& error) {
    return fail(function, kind, {Code::internal_error, error.what()});
  } catch (...) {
    return fail(function, kind, {Code::internal_error, "unknown"});
  }
}

[[nodiscard]] inline Status refuse(std::string reason) {
  return Status(Code::invalid_argument, std::move(reason));
}

}  // namespace pccl::capi
