// What the bindings share: failures as exceptions, deadlines, Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <functional>
#include <memory>
#include <optional>

#include "pccl/base/error.h"
#include "pccl/base/results.h"
#include "pccl/base/settings.h"
#include "pccl/bindings/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pccl::bindings {

using Seconds = std::optional<double>;

// Raises what pccl.errors makes of it. REQUIRES: the GIL.
[[noreturn]] void raise(const Error& error, CallKind kind, const char* function);

[[nodiscard]] std::optional<Duration> duration(const Seconds& seconds);

// The environment's settings, or InvalidArgument.
[[nodiscard]] Settings read_settings(const char* function);

// Looks for signals on behalf of a call that has released the GIL. What a handler raises
// (KeyboardInterrupt, mostly) is kept until the call is over.
class Signals {
 public:
  // True once a handler has raised. REQUIRES: not the GIL.
  [[nodiscard]] bool check();
  [[nodiscard]] std::function<bool()> hook() {
    return [this] { return check(); };
  }
  // Runs Python code of the user's; what it raises ends the call. REQUIRES: not the GIL.
  template <class Code>
  void run(const Code& code) {
    const GilAcquire gil;
    if (caught_ != nullptr) return;
    try {
      code();
    } catch (nb::python_error& error) {
      caught_ = std::make_unique<nb::python_error>(std::move(error));
    }
  }
  // Raises what a handler raised. REQUIRES: the GIL.
  void rethrow();

 private:
  std::unique_ptr<nb::python_error> caught_;
};

void bind_secret(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_operation(nb::module_& m);
void bind_reducer(nb::module_& m);
void bind_arrays(nb::module_& m);
void bind_master(nb::module_& m);
void bind_weighted(nb::module_& m);
void bind_xla(nb::module_& m);
void bind_doctor(nb::module_& m);

}  // namespace pccl::bindings
