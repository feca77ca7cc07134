// A master whose members send messages of the test's choice, an executor whose links do the same,
// and anonymous connections.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <asio/ip/address.hpp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/base/allowance.h"
#include "pccl/collective/executor.h"
#include "pccl/io/pending_connections.h"
#include "pccl/master/master.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/address.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace master = pccl::master;
namespace wire = pccl::wire;
using pccl::PeerId;
using pccl::tests::peer;

namespace {

// Group 0 with members 1, 2, ..., each on the connection of its number. Ids are sixteen bytes of
// the number.
class Play {
 public:
  Play(std::uint8_t members, const std::map<std::string, std::size_t>& limits,
       const std::vector<std::string>& from, const std::vector<std::string>& names)
      : options_(options(limits)) {
    master_.emplace(options_, 77, 1);
    for (std::uint8_t id = 1; id <= members; ++id) {
      connect(id, id <= from.size() ? from[id - 1U] : "192.0.2." + std::to_string(id));
      wire::Join join;
      join.id = peer(id);
      join.min_peers = members;
      join.waiting = true;
      join.addresses = {{"192.0.2.1", 1}};
      join.ticket = {join.id.bytes};
      if (id <= names.size()) join.name = names[id - 1U];
      master_->on_frame(id, {{master_->run(), 1, 0}, join}, now_);
    }
    (void)told();
  }
  Play(const Play&) = delete;
  Play& operator=(const Play&) = delete;

  void connect(master::ConnectionId id, const std::string& from) {
    master_->on_connect(id, from, now_);
  }
  void disconnect(master::ConnectionId id) { master_->on_disconnect(id, now_); }
  // Restarts the master; all members return to it with their reports. `relayed`: members that
  // report other relayed pairs.
  void restart(
      const std::map<std::uint8_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>>& relayed) {
    const wire::EpochRecord record = master_->group(0)->record();
    const std::uint64_t applied = master_->group(0)->log().last();
    const std::uint64_t run = master_->run();
    master_.emplace(options_, run + 1, 1);
    for (const wire::Member& member : record.members) {
      const std::uint8_t id = member.id.bytes[0];
      wire::Rejoin rejoin{member.id, 0, record, applied, {member.id.bytes}};
      if (const auto other = relayed.find(id); other != relayed.end()) {
        rejoin.record.relayed.clear();
        for (const auto& [a, b] : other->second) rejoin.record.relayed.push_back({a, b});
      }
      connect(id, "192.0.2." + std::to_string(id));
      master_->on_frame(id, {{run, 1, applied}, rejoin}, now_);
    }
    // One of them is asked for its log, which is empty as all members have applied it.
    kept_ = master_->take_actions();
    for (const master::Action& action : kept_) {
      const auto* send = std::get_if<master::Send>(&action);
      if (send == nullptr || !std::holds_alternative<wire::RequestLog>(read(send->bytes).message))
        continue;
      master_->on_frame(send->to, {{run, 1, applied}, wire::LogPart{{}, true}}, now_);
    }
  }
  // The result of the master's own attempt to reach the connection's address.
  void tried(master::ConnectionId id, bool reached) { master_->on_tried(id, reached, {}, now_); }

  [[nodiscard]] std::uint32_t term() const { return master_->term(); }

  // Sends one message with `ordinal` in its envelope (None: the newest). Raises ValueError if it is
  // invalid.
  void says(master::ConnectionId id, std::uint8_t type, nb::bytes payload,
            std::optional<std::uint64_t> ordinal, std::uint32_t term,
            std::optional<std::uint64_t> run) {
    wire::Bytes bytes = wire::encode({run.value_or(master_->run()), term, 0}, wire::RequestLog{});
    const auto size = static_cast<std::uint32_t>(payload.size());
    bytes[5] = type;
    for (std::size_t i = 0; i < 4; ++i) bytes[8 + i] = static_cast<std::uint8_t>(size >> (8 * i));
    const auto* data = static_cast<const std::uint8_t*>(payload.data());
    bytes.insert(bytes.end(), data, data + size);
    wire::FrameReader reader;
    reader.feed(bytes);
    wire::Frame frame;
    const auto next = reader.next(frame);
    if (!next) throw nb::value_error(next.error().reason.c_str());
    const master::Group* group = master_->group(0);
    frame.envelope.ordinal = ordinal.value_or(group == nullptr ? 0 : group->log().last());
    master_->on_frame(id, frame, now_);
  }

  // All connected peers except `silent` send heartbeats. All except `mute` have applied the whole
  // log.
  void passes(double seconds, const std::vector<std::uint8_t>& mute,
              const std::vector<std::uint8_t>& silent) {
    for (double left = seconds; left > 0; left -= 0.5) {
      now_ += std::chrono::milliseconds(500);
      for (std::uint8_t id = 1; id < 32 && has_group(0); ++id) {
        const bool behind = std::find(mute.begin(), mute.end(), id) != mute.end();
        const std::uint64_t last = master_->group(0)->log().last();
        if (std::ranges::find(silent, id) == silent.end() && master_->group(0)->knows(id))
          master_->on_frame(id, {{master_->run(), 1, behind ? 0 : last}, wire::Heartbeat{}}, now_);
      }
      master_->on_time(now_);
    }
  }

  // The actions since the last call: (connection, what, code, text).
  std::vector<std::tuple<master::ConnectionId, std::string, int, std::string>> told() {
    std::vector<std::tuple<master::ConnectionId, std::string, int, std::string>> all;
    std::vector<master::Action> actions = std::exchange(kept_, {});
    for (master::Action& action : master_->take_actions()) actions.push_back(std::move(action));
    for (const master::Action& action : actions) {
      if (const auto* close = std::get_if<master::Close>(&action)) {
        all.emplace_back(close->connection, "close", 0, "");
        master_->on_disconnect(close->connection, now_);
      }
      if (const auto* attempt = std::get_if<master::TryAddress>(&action))
        all.emplace_back(attempt->for_whom, "tries", 0, wire::to_string(attempt->address));
      const auto* send = std::get_if<master::Send>(&action);
      if (send == nullptr) continue;
      const wire::Frame frame = read(send->bytes);
      if (const auto* refused = std::get_if<wire::Refused>(&frame.message))
        all.emplace_back(send->to, "refused", static_cast<int>(refused->code), refused->reason);
      if (const auto* question = std::get_if<wire::Try>(&frame.message))
        all.emplace_back(send->to, "try", 0, wire::to_string(question->address));
      if (const auto* findings = std::get_if<wire::Findings>(&frame.message))
        all.emplace_back(send->to, "findings", static_cast<int>(findings->attempt.reached), "");
      if (const auto* relay = std::get_if<wire::Relay>(&frame.message))
        all.emplace_back(send->to, "relay", relay->peer.bytes[0], "");
      if (const auto* notice = std::get_if<wire::Notice>(&frame.message))
        all.emplace_back(send->to, "notice", 0, notice->text);
      if (const auto* part = std::get_if<wire::StatusPart>(&frame.message))
        all.emplace_back(send->to, "status", part->last ? 1 : 0, "");
      if (const auto* result = std::get_if<wire::CommandResult>(&frame.message))
        all.emplace_back(send->to, "result", result->done ? 1 : 0, result->text);
      if (std::holds_alternative<wire::Drain>(frame.message))
        all.emplace_back(send->to, "drain", 0, "");
      if (std::holds_alternative<wire::RequestLog>(frame.message))
        all.emplace_back(send->to, "request_log", 0, "");
      const auto term = static_cast<int>(frame.envelope.term);
      if (std::holds_alternative<wire::AskPromise>(frame.message))
        all.emplace_back(send->to, "ask_promise", term, "");
      if (std::holds_alternative<wire::Propose>(frame.message))
        all.emplace_back(send->to, "propose", term, "");
      if (const auto* answer = std::get_if<wire::NotServing>(&frame.message))
        all.emplace_back(send->to, "not_serving", answer->recovers ? 1 : 0, "");
      const auto* log = std::get_if<wire::Log>(&frame.message);
      if (log == nullptr) continue;
      for (const wire::LogEntry& entry : log->entries) {
        if (const auto* epoch = std::get_if<wire::EpochRecord>(&entry.what))
          all.emplace_back(send->to, "epoch", static_cast<int>(epoch->cause), "");
        if (const auto* verdict = std::get_if<wire::Verdict>(&entry.what))
          all.emplace_back(send->to, "verdict", static_cast<int>(verdict->code), verdict->reason);
        if (const auto* outcome = std::get_if<wire::Outcome>(&entry.what))
          all.emplace_back(send->to, "outcome", static_cast<int>(outcome->code), outcome->reason);
      }
    }
    return all;
  }

  std::vector<std::uint8_t> members() const {
    std::vector<std::uint8_t> ids;
    if (master_->group(0) == nullptr) return ids;
    for (const wire::Member& member : master_->group(0)->record().members)
      ids.push_back(member.id.bytes[0]);
    return ids;
  }
  std::uint64_t epoch() const { return master_->group(0)->record().epoch; }
  // The status of the run, with group 0: what tests look at. Newcomers: (name, number of the
  // state). Calls: (call, seconds, entered, missing). Events: (text, warning, group or -1).
  nb::dict status() const {
    const wire::RunStatus status = master_->status(now_);
    nb::list members;
    nb::list newcomers;
    nb::list calls;
    nb::list events;
    nb::dict all;
    for (const wire::GroupStatus& group : status.groups) {
      if (group.group != 0) continue;
      for (const wire::MemberStatus& member : group.members) {
        nb::list waits;
        for (const wire::WaitStatus& wait : member.waits)
          waits.append(nb::make_tuple(wait.call, seconds(wait.for_ms)));
        nb::dict one;
        one["name"] = member.name;
        one["waits"] = waits;
        one["connected"] = member.connected;
        one["draining"] = member.draining;
        one["heard"] = seconds(member.heard_ms);
        one["seconds"] = seconds(member.member_ms);
        one["operations"] = member.totals.operations;
        one["added"] = member.recent.operations;
        one["within"] = seconds(member.recent_ms);
        members.append(one);
      }
      for (const wire::NewcomerStatus& newcomer : group.newcomers)
        newcomers.append(nb::make_tuple(newcomer.name, static_cast<int>(newcomer.state)));
      for (const wire::CallStatus& call : group.calls) {
        calls.append(nb::make_tuple(call.call, seconds(call.open_ms), call.entered, call.missing));
      }
      all["operations"] = group.operations;
      all["aborted"] = group.aborted;
      all["epoch"] = group.epoch;
      all["missing"] = group.missing;
    }
    for (const wire::EventStatus& event : status.events) {
      events.append(nb::make_tuple(event.text, event.warning,
                                   event.of_group ? static_cast<int>(event.group) : -1));
    }
    all["members"] = members;
    all["newcomers"] = newcomers;
    all["calls"] = calls;
    all["events"] = events;
    all["paused"] = status.admission_paused;
    all["evictions"] = status.evictions;
    return all;
  }
  bool has_group(std::uint32_t id) const { return master_->group(id) != nullptr; }
  bool anonymous(master::ConnectionId id) const { return master_->anonymous(id); }
  // Pairs of ranks with a link in the plan.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> links() const {
    const auto edges = pccl::topology::edges(master_->group(0)->record().plan);
    return {edges.begin(), edges.end()};
  }
  // The members in the order of the plan's ring.
  std::vector<std::uint8_t> ring() const {
    const wire::EpochRecord& record = master_->group(0)->record();
    std::vector<std::uint8_t> ids;
    for (const std::uint32_t rank : record.plan.order)
      ids.push_back(record.members[rank].id.bytes[0]);
    return ids;
  }
  std::uint32_t segment_bytes() const { return master_->group(0)->record().plan.segment_bytes; }
  // Pairs of ranks that the master relays.
  std::vector<std::pair<std::uint32_t, std::uint32_t>> relayed() const {
    std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
    for (const auto& [a, b] : master_->group(0)->record().relayed) pairs.emplace_back(a, b);
    return pairs;
  }

 private:
  static double seconds(std::uint64_t ms) { return static_cast<double>(ms) / 1000; }
  static master::Options options(const std::map<std::string, std::size_t>& limits) {
    using master::Limits;
    const std::map<std::string, std::size_t Limits::*> sizes = {
        {"max_groups", &Limits::max_groups},
        {"max_peers", &Limits::max_peers},
        {"max_open_calls", &Limits::max_open_calls},
        {"many_open_calls", &Limits::many_open_calls},
        {"max_behind", &Limits::max_behind},
        {"max_recovering", &Limits::max_recovering},
        {"max_reported_bytes", &Limits::max_reported_bytes}};
    const std::map<std::string, pccl::Rate Limits::*> rates = {
        {"strays", &Limits::strays},     {"aborts", &Limits::aborts}, {"turns", &Limits::turns},
        {"restarts", &Limits::restarts}, {"breaks", &Limits::breaks}, {"wants", &Limits::wants},
        {"talk", &Limits::talk}};
    master::Options options;
    for (const auto& [name, value] : limits) {
      if (name == "relays") {
        options.relays = value > 0;
      } else if (name == "masters" || name == "place") {
        auto& place = name == "masters" ? options.place.masters : options.place.index;
        place = static_cast<std::uint32_t>(value);
      } else if (sizes.contains(name)) {
        options.limits.*sizes.at(name) = value;
      } else {
        options.limits.*rates.at(name) = {static_cast<double>(value), 0.1};
      }
    }
    return options;
  }

  static wire::Frame read(const wire::Bytes& bytes) {
    wire::FrameReader reader;
    reader.feed(bytes);
    wire::Frame frame;
    if (const auto next = reader.next(frame); !next || !*next)
      throw std::runtime_error("the master said what cannot be read");
    return frame;
  }

  master::Options options_;
  std::optional<master::Master> master_;
  std::vector<master::Action> kept_;  // not returned by told() yet
  pccl::Instant now_{std::chrono::seconds(1000)};
};

// Rank 0 of three ranks that sum `elements` float32 each, in segments of 4 KiB, with 64 KiB of
// memory for contributions. Epoch 1.
class Sums final : private pccl::link::Carrier {
 public:
  explicit Sums(std::size_t elements)
      : executor_({.buffer_bytes = 64 << 10}, std::make_shared<pccl::BufferPool>(0), *this,
                  serial_),
        elements_(elements) {
    auto world = std::make_shared<wire::EpochRecord>();
    world->epoch = world->admission = world->abort_floor = 1;
    for (std::uint8_t id = 0; id < 3; ++id) world->members.push_back({peer(id), id, {}, {}});
    world->plan = *pccl::topology::make_plan(3, 4096, {});
    world_ = std::move(world);
    executor_.set_epoch(1, 1, 1);
  }
  Sums(const Sums&) = delete;
  Sums& operator=(const Sums&) = delete;

  void start(std::uint64_t sequence) {
    arrays_.emplace_back(elements_, 1.0F);
    pccl::collective::OperationSpec spec;
    spec.key = key(sequence);
    spec.attempt = 1;
    spec.signature = 1;
    spec.arrays = {{arrays_.back().data(), arrays_.back().data(), elements_}};
    spec.world = world_;
    if (!executor_.start(std::move(spec))) throw std::runtime_error("it does not start");
  }

  // Receives "ready" or "ask" from a peer. Returns why it is refused, or "".
  std::string word(std::uint8_t from, const std::string& what, std::uint64_t sequence,
                   std::uint64_t attempt, std::uint32_t credit) {
    pccl::link::FrameHeader header = header_for(sequence, attempt);
    header.type = what == "ask" ? pccl::link::FrameType::ask : pccl::link::FrameType::ready;
    header.credit = credit;
    const pccl::Status status = executor_.control(peer(from), header, false);
    return status ? "" : status.error().reason;
  }

  // Receives a contribution from a peer. Returns "store", "drain", "hold", or why it is refused.
  std::string data(std::uint8_t from, std::uint64_t sequence, std::uint32_t segment,
                   std::uint32_t bytes, bool eager, bool final) {
    pccl::link::FrameHeader header = header_for(sequence, 1);
    header.type = pccl::link::FrameType::data;
    header.segment = segment;
    header.payload_bytes = bytes;
    header.eager = eager;
    header.final = final;
    pccl::link::Placement placement = executor_.place(peer(from), header, false);
    switch (placement.kind) {
      case pccl::link::Placement::Kind::drain:
        return "drain";
      case pccl::link::Placement::Kind::hold:
        return "hold";
      case pccl::link::Placement::Kind::refuse:
        return placement.reason;
      case pccl::link::Placement::Kind::store:
        break;
    }
    for (const iovec& part : placement.where) std::memset(part.iov_base, 0, part.iov_len);
    (void)executor_.arrived(peer(from), header, placement.token, std::move(placement.buffer),
                            false);
    executor_.combine();
    return "store";
  }

  // The number of data frames sent to a peer now.
  std::size_t sends(std::uint8_t to) {
    std::size_t count = 0;
    pccl::link::OutgoingFrame frame;
    while (executor_.next(peer(to), frame))
      count += pccl::link::type_of(frame) == pccl::link::FrameType::data ? 1 : 0;
    return count;
  }

 private:
  static wire::OpKey key(std::uint64_t sequence) { return {1, false, 0, sequence}; }
  static pccl::link::FrameHeader header_for(std::uint64_t sequence, std::uint64_t attempt) {
    pccl::link::FrameHeader header;
    header.signature = 1;
    header.key = key(sequence);
    header.attempt = attempt;
    return header;
  }
  void wake(const PeerId&) override {}
  std::uint64_t release(const PeerId&, std::uint64_t) override { return 0; }
  std::uint64_t unsent(const PeerId&, std::uint64_t) const override { return 0; }
  bool is_up(const PeerId&) const override { return true; }
  bool is_checked(const PeerId&) const override { return false; }

  pccl::Serial serial_;
  pccl::collective::Executor executor_;
  std::size_t elements_;
  std::shared_ptr<const wire::EpochRecord> world_;
  std::deque<std::vector<float>> arrays_;
};

// The number of events at `times` (seconds) that were allowed.
std::size_t allowed(double at_once, double per_second, const std::vector<double>& times) {
  pccl::Allowance allowance;
  std::size_t count = 0;
  for (const double time : times) {
    const pccl::Instant now{std::chrono::seconds(1000) + std::chrono::duration_cast<pccl::Duration>(
                                                             std::chrono::duration<double>(time))};
    count += allowance.take({at_once, per_second}, now) ? 1 : 0;
  }
  return count;
}

}  // namespace

void bind_hostile(nb::module_& m) {
  nb::class_<Play>(m, "MasterPlay")
      .def(
          "__init__",
          [](Play* self, std::uint8_t members, const nb::dict& limits,
             const std::vector<std::string>& from, const std::vector<std::string>& names) {
            std::map<std::string, std::size_t> read;
            for (const auto& [key, value] : limits)
              read[nb::cast<std::string>(key)] = nb::cast<std::size_t>(value);
            new (self) Play(members, read, from, names);
          },
          "members"_a, "limits"_a = nb::dict(), "addresses"_a = std::vector<std::string>(),
          "names"_a = std::vector<std::string>())
      .def("status", &Play::status)
      .def("connect", &Play::connect, "connection"_a, "address"_a)
      .def("disconnect", &Play::disconnect, "connection"_a)
      .def("tried", &Play::tried, "connection"_a, "reached"_a)
      .def("says", &Play::says, "connection"_a, "type"_a, "payload"_a,
           nb::arg("ordinal").none() = nb::none(), "term"_a = 1, nb::arg("run").none() = nb::none())
      .def("term", [](const Play& self) { return self.term(); })
      .def("passes", &Play::passes, "seconds"_a, "mute"_a = std::vector<std::uint8_t>(),
           "silent"_a = std::vector<std::uint8_t>())
      .def("told", &Play::told)
      .def("members", &Play::members)
      .def("epoch", &Play::epoch)
      .def("has_group", &Play::has_group, "group"_a)
      .def("anonymous", &Play::anonymous, "connection"_a)
      .def("restart", &Play::restart,
           "relayed"_a =
               std::map<std::uint8_t, std::vector<std::pair<std::uint32_t, std::uint32_t>>>())
      .def("links", &Play::links)
      .def("ring", &Play::ring)
      .def("segment_bytes", &Play::segment_bytes)
      .def("relayed", &Play::relayed);
  nb::class_<Sums>(m, "SumsPlay")
      .def(nb::init<std::size_t>(), "elements"_a)
      .def("start", &Sums::start, "sequence"_a)
      .def("word", &Sums::word, "peer"_a, "what"_a, "sequence"_a, "attempt"_a, "credit"_a)
      .def("data", &Sums::data, "peer"_a, "sequence"_a, "segment"_a, "bytes"_a, "eager"_a = false,
           "final"_a = false)
      .def("sends", &Sums::sends, "to"_a);
  using pccl::io::PendingConnections;
  nb::class_<PendingConnections>(m, "Anteroom")
      .def(nb::init<std::size_t, std::size_t, std::size_t>(), "most"_a, "most_from_one"_a,
           "most_bytes"_a)
      .def(
          "enter",
          [](PendingConnections& self, std::uint64_t id, const std::string& from) {
            self.add(id, asio::ip::make_address(from));
          },
          "connection"_a, "address"_a)
      .def("holds", &PendingConnections::set_bytes, "connection"_a, "bytes"_a)
      .def("leave", &PendingConnections::remove, "connection"_a)
      .def("crowded", &PendingConnections::over_limit)
      .def("size", &PendingConnections::size);
  m.def("allowed", &allowed, "at_once"_a, "per_second"_a, "times"_a);
}
