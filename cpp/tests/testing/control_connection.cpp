// When a peer dials which master, from what the masters answer.
#include "pccl/peer/control_connection.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <cstdint>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

class LinkPlay {
 public:
  explicit LinkPlay(std::uint32_t masters) : link_(pccl::Settings{}, masters, pccl::PeerId{}) {
    link_.start(now_);
  }

  // The number of the address that is dialled now, "silent", "elsewhere", "lost", or "" if nothing
  // is due.
  std::string due(bool member) {
    using Due = pccl::peer::ControlConnection::Due;
    switch (link_.on_time(now_, member)) {
      case Due::dial:
        return std::to_string(link_.at());
      case Due::silent:
        return "silent";
      case Due::elsewhere:
        link_.look_elsewhere(now_);
        return "elsewhere";
      case Due::lost:
        return "lost";
      case Due::nothing:
        if (link_.next_deadline() <= now_) throw std::logic_error("a deadline has passed");
        break;
    }
    return "";
  }
  void passes(double seconds) {
    now_ += std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
  }
  void opens() { link_.on_open(now_); }
  void enters() { link_.on_member(); }
  void hears() { link_.on_heard(now_); }
  void welcome(bool waits) { link_.on_welcome(waits, now_); }
  void not_serving(bool recovers) { link_.on_not_serving(recovers, now_); }
  void refuses() { link_.on_refused({pccl::Code::evicted, "left behind"}, now_); }
  void fails(bool welcomed) { (void)link_.on_lost("refused", welcomed, now_); }
  [[nodiscard]] bool may_found() const { return link_.may_found(); }
  [[nodiscard]] bool refused() const { return link_.refusal().has_value(); }
  [[nodiscard]] std::uint32_t failures() const { return link_.failures(); }

 private:
  pccl::Instant now_{std::chrono::hours(1)};
  pccl::peer::ControlConnection link_;
};

}  // namespace

void bind_control_connection(nb::module_& m) {
  nb::class_<LinkPlay>(m, "LinkPlay")
      .def(nb::init<std::uint32_t>(), "masters"_a)
      .def("due", &LinkPlay::due, "member"_a)
      .def("passes", &LinkPlay::passes, "seconds"_a)
      .def("opens", &LinkPlay::opens)
      .def("enters", &LinkPlay::enters)
      .def("hears", &LinkPlay::hears)
      .def("welcome", &LinkPlay::welcome, "waits"_a = false)
      .def("not_serving", &LinkPlay::not_serving, "recovers"_a)
      .def("refuses", &LinkPlay::refuses)
      .def("fails", &LinkPlay::fails, "welcomed"_a)
      .def("may_found", &LinkPlay::may_found)
      .def("refused", &LinkPlay::refused)
      .def("failures", &LinkPlay::failures);
}
