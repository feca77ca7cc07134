// Lines of the log, and texts that are cut, for pytest.
#include "pccl/base/log.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "pccl/base/utf8.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_log(nb::module_& m) {
  m.def(
      "log_line",
      [](const std::string& format, std::int64_t time, int level, const nb::bytes& who,
         std::uint64_t epoch, const nb::bytes& text) {
        const auto found = pccl::find_log_format(format);
        if (!found) throw std::invalid_argument("no such format");
        const std::string line =
            pccl::log_line(*found, time, static_cast<pccl::LogLevel>(level),
                           {who.c_str(), who.size()}, epoch, {text.c_str(), text.size()});
        return nb::bytes(line.data(), line.size());
      },
      "format"_a, "time"_a, "level"_a, "who"_a, "epoch"_a, "text"_a);
  m.def(
      "shortened",
      [](const nb::bytes& text, std::size_t most) {
        const std::string made = pccl::shortened({text.c_str(), text.size()}, most);
        return nb::bytes(made.data(), made.size());
      },
      "text"_a, "most"_a);
  nb::class_<pccl::LineLimit>(m, "LineLimit")
      .def(nb::new_([] { return std::make_unique<pccl::LineLimit>(); }))
      .def("take",
           [](pccl::LineLimit& limit, int level, const std::string& text, std::int64_t now) {
             return limit.take(static_cast<pccl::LogLevel>(level), text, now);
           });
}
