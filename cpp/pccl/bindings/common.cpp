#include "pccl/bindings/common.h"

#include <algorithm>
#include <cmath>

#include "pccl/wire/address.h"

namespace pccl::bindings {

nb::object text(const std::string& bytes) {
  nb::object made = nb::steal(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
  if (!made.is_valid()) throw nb::python_error();  // no memory
  return made;
}

nb::list texts(const std::vector<std::string>& list) {
  nb::list made;
  for (const std::string& bytes : list) made.append(text(bytes));
  return made;
}

void raise(const Error& error, CallKind kind, const char* function) {
  const nb::object make = nb::module_::import_("pccl.errors").attr("from_engine");
  const nb::object exception =
      call(make, static_cast<int>(error.code), static_cast<int>(result_of(error.code, kind)),
           function, text(error.reason), error.peer.empty() ? std::string() : error.peer.hex(),
           text(error.waiting));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

void refuse(const char* function, std::string reason) {
  raise({Code::invalid_argument, std::move(reason)}, CallKind::collective, function);
}

wire::Address parse_address(const std::string& text, std::uint16_t default_port,
                            const char* function) {
  auto address = value_of(wire::parse_address(text, default_port), CallKind::collective, function);
  if (address.host.empty()) refuse(function, "\"" + text + "\" names no host");
  return address;
}

std::vector<wire::Address> parse_addresses(const std::vector<std::string>& texts,
                                           const char* function) {
  std::vector<wire::Address> addresses;
  for (const std::string& text : texts) addresses.push_back(parse_address(text, 0, function));
  return addresses;
}

std::optional<Duration> duration(const Seconds& seconds) {
  constexpr double kMost = 1e8;  // three years; keeps every sum of durations far from overflow
  if (!seconds || std::isnan(*seconds)) return std::nullopt;
  const std::chrono::duration<double> wanted(std::clamp(*seconds, 0.0, kMost));
  return std::chrono::round<Duration>(wanted);
}

Settings read_settings(const char* function) {
  return value_of(Settings::from_environment(), CallKind::collective, function);
}

bool Signals::check() {
  const GilAcquire gil;
  if (caught_ == nullptr && run_python([] { return PyErr_CheckSignals(); }) != 0) {
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
