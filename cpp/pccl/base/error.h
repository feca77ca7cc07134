// Causes of failure, and the types that hold a value or an error.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

#include "pccl/base/ids.h"

namespace pccl {

// The cause of a failure, and the caller's remedy. Each cause is one Python exception class
// (pccl/errors.py).
enum class Code : std::uint8_t {
  ok = 0,
  invalid_argument = 1,        // fix: this call's own arguments
  invalid_usage = 2,           // fix: wrong state (not connected, closed, twice, forked)
  not_initialized = 3,         // fix: simple API used before init
  pending_operations = 4,      // fix: explicit-API topology call, unfinished handles
  not_supported = 5,           // fix: not implemented
  mismatched_call = 6,         // fix: members disagree; `peer` is the odd one out
  deadlock = 7,                // fix: members wait in calls that cannot meet
  too_few_peers = 8,           // retry: explicit-API reduction alone
  peer_lost = 9,               // retry: a member was lost in the operation, inputs are intact
  unreachable = 10,            // rejoin: no path to another member
  timeout = 11,                // retry: a caller's deadline
  master_lost = 12,            // rejoin: no master within the reconnect window
  refused = 13,                // fix: join refused (version, limits, group)
  authentication_failed = 14,  // fix: secret
  evicted = 15,                // rejoin: the master removed this peer
  revision_mismatch = 16,      // fix: offered revision is ahead of the group's
  state_unavailable = 17,      // stop: no holder of the state left
  internal_error = 18,         // stop: a broken invariant of ours
  interrupted = 19,            // the caller pressed Ctrl-C; other members see peer_lost
};

// A failure: its cause, one sentence for the user, and the peer concerned.
struct Error {
  Code code = Code::internal_error;
  std::string reason;
  PeerId peer{};          // the odd one out, the lost one, ...; zero: no peer in particular
  std::string waiting{};  // deadlock only: one line per member, with the calls in which it waits
};

// Success or an Error.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::move(error)), ok_(false) {}  // NOLINT: implicit by design
  Status(Code code, std::string reason) : Status(Error{code, std::move(reason)}) {}
  [[nodiscard]] bool ok() const { return ok_; }
  explicit operator bool() const { return ok_; }
  [[nodiscard]] const Error& error() const { return error_; }

 private:
  Error error_{Code::ok, {}};
  bool ok_ = true;
};

// A T or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit by design
  Result(Error error) : state_(std::move(error)) {}  // NOLINT: implicit by design
  Result(Code code, std::string reason) : state_(Error{code, std::move(reason)}) {}
  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  T& operator*() { return std::get<0>(state_); }
  const T& operator*() const { return std::get<0>(state_); }
  T* operator->() { return &std::get<0>(state_); }
  const T* operator->() const { return &std::get<0>(state_); }
  [[nodiscard]] const Error& error() const { return std::get<1>(state_); }

 private:
  std::variant<T, Error> state_;
};

}  // namespace pccl
