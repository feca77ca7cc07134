#include "pccl/bindings/common.h"

#include <algorithm>
#include <cmath>

namespace pccl::bindings {

void raise(const Error& error, CallKind kind, const char* function) {
  const nb::object make = nb::module_::import_("pccl.errors").attr("from_engine");
  const nb::object exception =
      make(static_cast<int>(error.code), static_cast<int>(result_of(error.code, kind)), function,
           error.reason, error.peer.empty() ? std::string() : error.peer.hex(), error.waiting);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

std::optional<Duration> duration(const Seconds& seconds) {
  constexpr double kMost = 1e8;  // three years; keeps every sum of durations far from overflow
  if (!seconds || std::isnan(*seconds)) return std::nullopt;
  const std::chrono::duration<double> wanted(std::clamp(*seconds, 0.0, kMost));
  return std::chrono::round<Duration>(wanted);
}

Settings read_settings(const char* function) {
  const Result<Settings> settings = Settings::from_environment();
  if (!settings) raise(settings.error(), CallKind::collective, function);
  return *settings;
}

bool Signals::check() {
  const GilAcquire gil;
  if (caught_ == nullptr && PyErr_CheckSignals() != 0) {
    caught_ = std::make_unique<nb::python_error>();
  }
  return caught_ != nullptr;
}

void Signals::rethrow() {
  if (caught_ == nullptr) return;
  caught_->restore();
  caught_.reset();
  throw nb::python_error();
}

}  // namespace pccl::bindings
