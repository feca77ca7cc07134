// When a member reports a link that does not come about.
#include <nanobind/nanobind.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>

#include "pccl/link/links.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Its other end refuses every dial, so no frame comes.
class MissingLink final : private pccl::link::Traffic {
 public:
  // An epoch with these two members begins, whose plan has the link.
  void epoch(bool may_relay) {
    table_.begin_epoch(context());
    table_.want({{other_.id, {other_, true, may_relay}}}, {other_.id}, context());
    look();
  }
  void passes(double seconds) {
    const pccl::Instant end =
        now_ + std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
    while (now_ < end) {
      now_ += std::chrono::milliseconds(100);
      table_.on_time(context());
      if (++ticks_ % 10 == 0) table_.on_watch(context());
      look();
    }
  }
  // The reports that the link is unreachable.
  [[nodiscard]] std::size_t reports() const { return reports_; }

 private:
  [[nodiscard]] pccl::link::LinkContext context() const {
    pccl::link::LinkContext context;
    context.now = now_;
    context.run = 1;
    context.joined = other_.joined + 1;
    context.member = context.may_report = true;
    return context;
  }
  void look() {
    for (const pccl::link::DialRequest& dial : table_.take_actions().dials)
      table_.on_dial_failed(dial.token, "refused", context());
    for (const pccl::link::LinkEvent& event : table_.take_events()) {
      const auto* report = std::get_if<pccl::link::LinkStateReport>(&event);
      if (report != nullptr && report->state == pccl::wire::LinkState::unreachable) ++reports_;
    }
  }

  pccl::link::Placement place(pccl::link::Stripe&, const pccl::link::FrameHeader&) override {
    return {};
  }
  pccl::Status arrived(pccl::link::Stripe&, const pccl::link::FrameHeader&, std::uint64_t,
                       pccl::Buffer) override {
    return {};
  }
  void voided(pccl::link::Stripe&, const pccl::link::FrameHeader&, std::uint64_t) override {}
  void drained(pccl::link::Stripe&, const pccl::link::FrameHeader&) override {}
  void interrupted(pccl::link::Stripe&, const pccl::link::FrameHeader&, std::uint64_t) override {}
  pccl::Status control(pccl::link::Stripe&, const pccl::link::FrameHeader&,
                       std::span<const std::uint8_t>) override {
    return {};
  }
  bool next(pccl::link::Stripe&, pccl::link::OutgoingFrame&) override { return false; }

  pccl::Instant now_{std::chrono::hours(1)};
  pccl::wire::Member other_{pccl::tests::peer(1), 1, {{"192.0.2.1", 1}}, {}};
  pccl::link::LinkTable table_{{pccl::tests::peer(2), {}, {}}, *this};
  std::uint64_t ticks_ = 0;
  std::size_t reports_ = 0;
};

}  // namespace

void bind_missing_link(nb::module_& m);
void bind_missing_link(nb::module_& m) {
  nb::class_<MissingLink>(m, "MissingLink")
      .def(nb::init<>())
      .def("epoch", &MissingLink::epoch, "may_relay"_a = false)
      .def("passes", &MissingLink::passes, "seconds"_a)
      .def("reports", &MissingLink::reports);
}
