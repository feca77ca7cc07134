// The master's relay, with sockets whose other ends the test holds; and a member that asks for
// relays.
#include "pccl/server/relay.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/fork.h"
#include "pccl/peer/engine.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/messages.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace wire = pccl::wire;

namespace {

template <class Kind = pccl::PeerIdKind>
pccl::Bits128<Kind> id_of(const nb::bytes& bytes) {
  pccl::Bits128<Kind> id;
  std::memcpy(id.bytes.data(), bytes.c_str(), std::min(bytes.size(), id.bytes.size()));
  return id;
}
pccl::RelayToken token_of(const nb::bytes& bytes) { return id_of<pccl::RelayTokenKind>(bytes); }

class Desk {
 public:
  Desk(std::uint64_t rate, std::size_t most_open) : relays_(context_, rate, most_open) {}

  void expect(const nb::bytes& one, const nb::bytes& other, const nb::bytes& token_of_one,
              const nb::bytes& token_of_other) {
    relays_.expect(id_of(one), id_of(other), token_of(token_of_one), token_of(token_of_other),
                   now_);
  }
  // Takes the descriptor over.
  bool enter(const nb::bytes& token, int descriptor) {
    const int own = pccl::open_descriptor([&] { return ::dup(descriptor); });
    ::close(descriptor);
    return relays_.enter(token_of(token), std::make_unique<pccl::io::Socket>(context_, own), now_);
  }
  void end(const nb::bytes& one, const nb::bytes& other) { relays_.end(id_of(one), id_of(other)); }
  // Advances the clock of tokens.
  void wait(double seconds) {
    now_ += std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
    relays_.on_time(now_);
  }
  // Runs the relay while it has work, for at most this many seconds.
  void run(double seconds) {
    const nb::gil_scoped_release release;
    context_.restart();
    context_.run_for(std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds)));
  }

 private:
  asio::io_context context_;
  pccl::Instant now_ = std::chrono::steady_clock::now();
  pccl::server::Relays relays_;
};

// The newest of several members. The plan links only this member with each other member. It cannot
// connect to any of them.
class RelayedPeer {
 public:
  RelayedPeer(std::uint8_t others,
              const std::vector<std::pair<std::uint32_t, std::uint32_t>>& pairs)
      : engine_(options(others), std::make_shared<pccl::BufferPool>(0)) {
    wire::EpochRecord record;
    record.epoch = record.admission = record.abort_floor = 1;
    std::set<pccl::topology::Edge> unusable;
    for (std::uint32_t rank = 0; rank <= others; ++rank) {
      record.members.push_back({peer(rank), rank + 1, {{"192.0.2.1", 1}}, {}});
      for (std::uint32_t before = 0; before < rank && rank < others; ++before)
        unusable.insert({before, rank});
    }
    record.plan = *pccl::topology::make_plan(others + 1U, 1 << 19, unusable);
    for (const auto& [a, b] : pairs) record.relayed.push_back({a, b});
    engine_.start(now_);
    engine_.on_control_open(now_);
    hears(wire::Welcome{others + 1U, false, 0, {}});
    hears(wire::Log{{{1, record}}});
  }
  RelayedPeer(const RelayedPeer&) = delete;
  RelayedPeer& operator=(const RelayedPeer&) = delete;

  // Why the member rejected that epoch. Empty: it accepted it.
  [[nodiscard]] std::string refuses() const {
    return engine_.standing() == pccl::peer::Standing::member ? "" : engine_.control().failure();
  }

  // Runs for this many seconds. Returns when the member asked for a relay, and to which others.
  std::vector<std::pair<double, unsigned>> asks(double seconds) {
    std::vector<std::pair<double, unsigned>> asked;
    const pccl::Instant began = now_;
    const auto until =
        began + std::chrono::round<pccl::Duration>(std::chrono::duration<double>(seconds));
    for (; now_ < until; now_ += std::chrono::milliseconds(50)) {
      hears(wire::Heartbeat{});
      engine_.on_time(now_);
      pccl::peer::EngineActions actions = engine_.take_actions();
      for (const auto& dial : actions.dials)
        engine_.connections(now_).on_dial_failed(dial.token, "refused");
      wire::FrameReader reader;
      for (const wire::Bytes& bytes : actions.control) reader.feed(bytes);
      wire::Frame frame;
      while (*reader.next(frame)) {
        if (const auto* want = std::get_if<wire::WantRelay>(&frame.message))
          asked.emplace_back(pccl::in_seconds(now_ - began), want->peer.bytes[0]);
      }
    }
    return asked;
  }

 private:
  static pccl::PeerId peer(std::uint32_t rank) {
    pccl::PeerId id;
    id.bytes.fill(static_cast<std::uint8_t>(rank + 1));
    return id;
  }
  static pccl::peer::EngineOptions options(std::uint32_t rank) {
    pccl::peer::EngineOptions options;
    options.join.id = peer(rank);
    return options;
  }
  void hears(const wire::Message& message) {
    engine_.on_control_bytes(wire::encode({7, 1, 0}, message), now_);
  }

  pccl::Instant now_{std::chrono::seconds(1000)};
  pccl::peer::Engine engine_;
};

}  // namespace

void bind_relay(nb::module_& m) {
  nb::class_<RelayedPeer>(m, "RelayedPeer")
      .def(nb::init<std::uint8_t, const std::vector<std::pair<std::uint32_t, std::uint32_t>>&>(),
           "others"_a, "relayed"_a)
      .def("refuses", &RelayedPeer::refuses)
      .def("asks", &RelayedPeer::asks, "seconds"_a);
  nb::class_<Desk>(m, "RelayDesk")
      .def(nb::init<std::uint64_t, std::size_t>(), "rate"_a = 0, "most_open"_a = 512)
      .def("expect", &Desk::expect, "one"_a, "other"_a, "token_of_one"_a, "token_of_other"_a)
      .def("enter", &Desk::enter, "token"_a, "descriptor"_a)
      .def("end", &Desk::end, "one"_a, "other"_a)
      .def("wait", &Desk::wait, "seconds"_a)
      .def("run", &Desk::run, "seconds"_a);
}
