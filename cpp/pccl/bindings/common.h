// Shared by the bindings: failures as exceptions, deadlines, Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/results.h"
#include "pccl/bindings/gil.h"
#include "pccl/node/communicator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pccl::bindings {

using Seconds = std::optional<double>;

// A str of bytes that come from a peer and need not be UTF-8. REQUIRES: the GIL.
[[nodiscard]] nb::object text(const std::string& bytes);
[[nodiscard]] nb::list texts(const std::vector<std::string>& list);

// Raises the exception that pccl.errors makes of an error. REQUIRES: the GIL.
[[noreturn]] void raise(const Error& error, CallKind kind, const char* function);
// Raises InvalidArgument. REQUIRES: the GIL.
[[noreturn]] void refuse(const char* function, std::string reason);

// The value, or the error raised. REQUIRES: the GIL.
template <class T>
[[nodiscard]] T value_of(Result<T> result, CallKind kind, const char* function) {
  if (!result) raise(result.error(), kind, function);
  return std::move(*result);
}

// A T that is made at the first call and never freed: the interpreter may be gone before static
// objects are. REQUIRES: the GIL, which guards it. (C++ would guard a static object with a lock,
// for which a thread could wait while it holds the GIL.)
template <class T>
[[nodiscard]] const T& immortal() {
  static const T* made = nullptr;
  if (made == nullptr) made = new T;
  return *made;
}

// "host:port" texts of a user's. REQUIRES: the GIL.
[[nodiscard]] wire::Address parse_address(const std::string& text, std::uint16_t default_port,
                                          const char* function);
[[nodiscard]] std::vector<wire::Address> parse_addresses(const std::vector<std::string>& texts,
                                                         const char* function);

[[nodiscard]] std::optional<Duration> duration(const Seconds& seconds);

// `names`: of all values of the enum, in order.
template <class Enum, std::size_t kCount>
const char* name_of(Enum value, const std::array<const char*, kCount>& names) {
  static_assert(kCount == enum_count(Enum{}));
  return names[static_cast<std::size_t>(value)];
}

// The environment's settings. REQUIRES: the GIL.
[[nodiscard]] Settings read_settings(const char* function);

// Looks for signals on behalf of a call that has released the GIL. Keeps what a handler raises
// (mostly KeyboardInterrupt) until the call is over.
class Signals {
 public:
  // True once a handler has raised. REQUIRES: not the GIL.
  [[nodiscard]] bool check();
  [[nodiscard]] std::function<bool()> hook() {
    return [this] { return check(); };
  }
  // Runs the user's Python code; an exception from it ends the call. REQUIRES: not the GIL.
  template <class Code>
  void run(const Code& code) {
    const GilAcquire gil;
    if (caught_ != nullptr) return;
    try {
      code();
    } catch (nb::python_error& error) {
      keep(std::move(error));
    }
  }
  // Keeps an exception, which then ends the call, unless there is one. REQUIRES: the GIL.
  void keep(nb::python_error&& error) {
    if (caught_ == nullptr) caught_ = std::make_unique<nb::python_error>(std::move(error));
  }
  // Raises what a handler raised. REQUIRES: the GIL.
  void rethrow();

 private:
  std::unique_ptr<nb::python_error> caught_;
};

// The numbers of communicators, for compiled programs (xla.cpp): a program may outlive its
// communicator, and holds its number only. *any thread*

// A number that no other communicator of this process has.
[[nodiscard]] std::int64_t next_communicator();
// Null: it is closed.
void enlist_communicator(std::int64_t number, const std::shared_ptr<node::Communicator>& engine);

void bind_secret(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_operation(nb::module_& m);
void bind_reducer(nb::module_& m);
void bind_arrays(nb::module_& m);
void bind_master(nb::module_& m);
void bind_weighted(nb::module_& m);
void bind_xla(nb::module_& m);
void bind_doctor(nb::module_& m);
void bind_status(nb::module_& m);

}  // namespace pccl::bindings
