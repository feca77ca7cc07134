// The two ends of one link, on a path that is cut and on connections that stall.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/link/links.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr pccl::Duration kStep = std::chrono::milliseconds(50);
constexpr pccl::Duration kDialAgain = std::chrono::seconds(1);
constexpr pccl::Duration kDialTimeout = std::chrono::seconds(3);

// One end. It has no data to send.
class LinkEnd final : private pccl::link::Traffic {
 public:
  LinkEnd(std::uint8_t self, std::uint8_t other, double interval)
      : number_(self),
        other_{pccl::tests::peer(other), other, {{"192.0.2.1", 1}}, {}},
        table_{options(self, interval), *this} {
    table_.begin_epoch(context());
    table_.want({{other_.id, {other_, true, false}}}, {other_.id}, context());
  }

  void at(pccl::Instant now) { now_ = now; }
  void passes(std::uint64_t step) {
    table_.on_time(context());
    if (step % 5 == 0) table_.on_tick(context());
    if (step % 20 == 0) table_.on_watch(context());
    for (const pccl::link::LinkEvent& event : table_.take_events())
      if (std::holds_alternative<pccl::link::LinkDown>(event)) ++downs_;
  }
  [[nodiscard]] pccl::link::LinkContext context() const {
    pccl::link::LinkContext context;
    context.now = now_;
    context.run = 1;
    context.joined = number_;
    context.member = context.may_report = true;
    return context;
  }
  [[nodiscard]] pccl::link::LinkTable& table() { return table_; }
  [[nodiscard]] std::size_t downs() const { return downs_; }
  void ping() { table_.ping(other_.id); }

 private:
  static pccl::link::LinkOptions options(std::uint8_t self, double interval) {
    pccl::link::LinkOptions options{pccl::tests::peer(self), {}, {}};
    options.settings.heartbeat_interval =
        std::chrono::round<pccl::Duration>(std::chrono::duration<double>(interval));
    return options;
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
  pccl::Status control(pccl::link::Stripe& from, const pccl::link::FrameHeader& header,
                       std::span<const std::uint8_t> payload) override {
    return table_.on_control(from, header, payload, context()).value_or(pccl::Status{});
  }
  bool next(pccl::link::Stripe& to, pccl::link::OutgoingFrame& frame) override {
    bool traffic_may = false;
    return table_.next(to, frame, traffic_may, now_);
  }

  pccl::Instant now_{std::chrono::hours(1)};
  std::uint8_t number_;
  pccl::wire::Member other_;
  pccl::link::LinkTable table_;
  std::size_t downs_ = 0;
};

class SilentLink {
 public:
  // Seconds between signs of life.
  SilentLink(double newer, double older) : older_(1, 2, older), newer_(2, 1, newer) {}
  void passes(double seconds) {
    const pccl::Instant end =
        now_ + std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
    while (now_ < end) {
      now_ += kStep;
      older_.at(now_);
      newer_.at(now_);
      ++step_;
      newer_.passes(step_);
      if (!frozen_) older_.passes(step_);
      for (bool moved = true; moved;) moved = carry_out() | pump();
    }
  }
  // Nothing comes through, and TCP's next try on the connections that are up is far away.
  void cut() {
    cut_ = true;
    for (auto& [id, stalled] : connections_) stalled = true;
  }
  // New connections work again. `resume`: those of before, too.
  void heal(bool resume) {
    cut_ = false;
    for (auto& [id, stalled] : connections_) stalled = stalled && !resume;
  }
  // The older peer's process stops, or goes on with the timers that are due. Its kernel never
  // stops.
  void freeze(bool frozen) {
    frozen_ = frozen;
    if (!frozen_) older_.passes(0);
  }
  void ping() { older_.ping(); }

  // Established at both ends, and not stalled.
  [[nodiscard]] std::size_t working() {
    std::size_t count = 0;
    for (const auto& [id, stalled] : connections_)
      count += !stalled && newer_.table().is_established(id) && older_.table().is_established(id);
    return count;
  }
  [[nodiscard]] std::size_t dials() const { return dials_; }
  [[nodiscard]] std::uint64_t stand_ins() { return newer_.table().stand_ins(); }
  [[nodiscard]] std::size_t downs() const { return newer_.downs() + older_.downs(); }

 private:
  bool carry_out() {
    const pccl::link::LinkActions newer = newer_.table().take_actions();
    const pccl::link::LinkActions older = older_.table().take_actions();
    for (const pccl::link::DialRequest& dial : newer.dials) {
      ++dials_;
      open_.push_back({dial.token, now_});
    }
    // Nobody can connect to the newer peer.
    for (const pccl::link::DialRequest& dial : older.dials)
      older_.table().on_dial_failed(dial.token, "refused", older_.context());
    bool moved = connect();
    moved = close(newer.close, older_) | moved;
    return close(older.close, newer_) | moved;
  }
  bool connect() {
    bool moved = false;
    for (const Dial& dial : std::exchange(open_, {})) {
      if (!cut_ && (now_ - dial.since) % kDialAgain == pccl::Duration{}) {
        const std::uint64_t id = next_++;
        connections_[id] = false;
        newer_.table().on_dialled(dial.token, id, {}, newer_.context());
        accepted_.push_back(id);
        moved = true;
      } else if (now_ - dial.since >= kDialTimeout) {
        newer_.table().on_dial_failed(dial.token, "no answer", newer_.context());
      } else {
        open_.push_back(dial);
      }
    }
    for (; !frozen_ && !accepted_.empty(); accepted_.pop_front())
      older_.table().on_accepted(accepted_.front(), {}, older_.context());
    return moved;
  }
  bool close(const std::vector<std::uint64_t>& ids, LinkEnd& other) {
    bool moved = false;
    for (const std::uint64_t id : ids) {
      const auto it = connections_.find(id);
      if (it == connections_.end()) continue;
      if (!it->second)
        other.table().on_stripe_failed(id, {pccl::Code::unreachable, "closed"}, other.context());
      connections_.erase(it);
      moved = true;
    }
    return moved;
  }
  bool pump() {
    bool moved = false;
    std::vector<std::uint64_t> ids;
    for (const auto& [id, stalled] : connections_)
      if (!stalled) ids.push_back(id);
    for (const std::uint64_t id : ids) {
      if (frozen_) continue;
      moved = pump(newer_, older_, id) | moved;
      moved = pump(older_, newer_, id) | moved;
    }
    return moved;
  }
  static bool pump(LinkEnd& from, LinkEnd& to, std::uint64_t id) {
    pccl::link::Stripe* const source = from.table().stripe(id);
    if (source == nullptr || to.table().stripe(id) == nullptr) return false;
    bool moved = false;
    for (auto parts = source->outgoing(); !parts.empty(); parts = source->outgoing()) {
      const std::span<const std::uint8_t> bytes(
          static_cast<const std::uint8_t*>(parts.front().iov_base), parts.front().iov_len);
      if (!receive(to, id, bytes)) return moved;
      source->sent(bytes.size());
      moved = true;
    }
    return moved;
  }
  static bool receive(LinkEnd& to, std::uint64_t id, std::span<const std::uint8_t> bytes) {
    while (!bytes.empty()) {
      pccl::link::Stripe* const stripe = to.table().stripe(id);
      if (stripe == nullptr) return false;
      const std::span<const iovec> room = stripe->incoming();
      if (room.empty()) return false;
      const std::size_t size = std::min(bytes.size(), room.front().iov_len);
      std::copy_n(bytes.begin(), size, static_cast<std::uint8_t*>(room.front().iov_base));
      if (const pccl::Status status = stripe->received(size); !status) {
        to.table().on_stripe_failed(id, status.error(), to.context());
        return false;
      }
      bytes = bytes.subspan(size);
    }
    return true;
  }

  struct Dial {
    std::uint64_t token = 0;
    pccl::Instant since{};
  };
  pccl::Instant now_{std::chrono::hours(1)};
  std::uint64_t step_ = 0;
  LinkEnd older_;
  LinkEnd newer_;
  std::map<std::uint64_t, bool> connections_;  // by the number of their stripes: stalled
  std::vector<Dial> open_;
  std::deque<std::uint64_t> accepted_;  // by the older peer's kernel
  std::uint64_t next_ = 1;
  std::size_t dials_ = 0;
  bool cut_ = false;
  bool frozen_ = false;
};

}  // namespace

void bind_silent_link(nb::module_& m);
void bind_silent_link(nb::module_& m) {
  nb::class_<SilentLink>(m, "SilentLink")
      .def(nb::init<double, double>(), "newer"_a = 1.0, "older"_a = 1.0)
      .def("passes", &SilentLink::passes, "seconds"_a)
      .def("cut", &SilentLink::cut)
      .def("heal", &SilentLink::heal, "resume"_a = false)
      .def("freeze", &SilentLink::freeze, "frozen"_a)
      .def("ping", &SilentLink::ping)
      .def("working", &SilentLink::working)
      .def("dials", &SilentLink::dials)
      .def("stand_ins", &SilentLink::stand_ins)
      .def("downs", &SilentLink::downs);
}
