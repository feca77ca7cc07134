// A receiver's transfer of a shared state, frame by frame, and a peer's messages when it returns to
// the master during a sync.
#include "pccl/state/transfer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/link/carrier.h"
#include "pccl/peer/session.h"
#include "pccl/topology/plan.h"
#include "tests/peers.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace stripes = pccl::link;
namespace state = pccl::state;
namespace wire = pccl::wire;
using pccl::PeerId;
using pccl::tests::peer;

namespace {

// (chunk, memory, offset)
using Places = std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t>>;

constexpr std::uint32_t kManifestSegment = 0xffffffff;
constexpr state::SyncId kSync{5, 2};

wire::Bytes copy(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::uint8_t*>(bytes.data());
  return {data, data + bytes.size()};
}

nb::bytes to_python(std::span<const std::uint8_t> bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

std::shared_ptr<state::LocalState> hashed(std::vector<wire::Bytes>& arrays, bool writable) {
  std::vector<state::LocalEntry> entries;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    state::LocalEntry entry;
    entry.what.name = std::string(1, static_cast<char>('a' + i));
    entry.what.kind = "uint8";
    entry.what.shape = {arrays[i].size()};
    entry.what.bytes = arrays[i].size();
    entry.data = arrays[i].data();
    if (writable) entry.writable = arrays[i].data();
    entries.push_back(std::move(entry));
  }
  pccl::Serial serial;
  return *state::hash(std::move(entries), serial, {});
}

// Peer 0, which receives the arrays "a", "b", ... from the holders 1, 2, ...
class Receiver final : private stripes::Carrier, private state::NeighbourMemory {
 public:
  Receiver(const std::vector<nb::bytes>& old, const std::vector<nb::bytes>& now,
           std::uint8_t holders, bool writable, bool overwrite, bool waits)
      : waits_(waits) {
    for (const nb::bytes& bytes : old) old_.push_back(copy(bytes));
    for (const nb::bytes& bytes : now) new_.push_back(copy(bytes));
    mine_ = hashed(old_, writable);
    mine_->overwrite = overwrite;
    begin(holders);
  }

  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  // The next request to a holder: (for the manifest, chunks). None: there is none.
  std::optional<std::pair<bool, std::vector<std::uint32_t>>> next(std::uint8_t to) {
    stripes::OutgoingFrame frame;
    if (!transfer_.next(peer(to), frame)) return std::nullopt;
    if (stripes::decode(frame.header)->type != stripes::FrameType::fetch)
      throw nb::value_error("a receiver serves");
    state::Fetch fetch;
    wire::Reader reader(frame.owned);
    reader(fetch);
    asked_for_bytes_ = fetch.unreadable;
    return std::pair(fetch.manifest, fetch.chunks);
  }
  // The request that next() returned last says that this peer cannot read memory.
  [[nodiscard]] bool asked_for_bytes() const { return asked_for_bytes_; }

  // Memory of a holder arrives. No bytes: it cannot be mapped.
  void shared(std::uint8_t of, std::uint64_t number, const nb::bytes& bytes) {
    shared_[{peer(of), number}] = copy(bytes);
  }
  // A holder says where chunks are: (chunk, memory, offset). False: the frame is refused.
  bool located(std::uint8_t from, const Places& chunks) {
    state::Located places;
    for (const auto& [number, memory, offset] : chunks)
      places.chunks.push_back({number, {memory, offset}});
    return say(from, stripes::FrameType::located, 0, wire::encoded(places));
  }
  // Reads what can be read. False: there is nothing.
  bool read() {
    const bool work = transfer_.has_work();
    transfer_.read();
    return work;
  }
  // From now on, this peer can read this one's memory: number i is the array i.
  void let_read(std::uint8_t other) { readers_.insert(peer(other)); }

  // A holder begins to send a frame. Returns "store", "drain" or "refuse". For "store", fill() and
  // then arrived() or voided() follow with the same number.
  std::string begins(int number, std::uint8_t from, std::optional<std::uint32_t> chunk) {
    Frame& frame = frames_[number];
    frame.from = from;
    frame.header.type = stripes::FrameType::state;
    frame.header.key.admission = kSync.admission;
    frame.header.key.sequence = kSync.sequence;
    frame.header.segment = chunk.value_or(kManifestSegment);
    if (chunk) {
      const state::ChunkIndex index(elected_->manifest.entries);
      const state::ChunkRange range = index.at(*chunk);
      const std::uint8_t* data = new_[range.entry].data() + range.offset;
      frame.bytes.assign(data, data + range.bytes);
    } else {
      frame.bytes = wire::encoded(elected_->manifest);
    }
    frame.header.payload_bytes = static_cast<std::uint32_t>(frame.bytes.size());
    frame.placement = transfer_.place(peer(from), frame.header);
    switch (frame.placement.kind) {
      case stripes::Placement::Kind::store:
        return "store";
      case stripes::Placement::Kind::drain:
        return "drain";
      default:
        return "refuse";
    }
  }
  // Writes the frame's bytes to their place. `spoilt`: other bytes.
  void fill(int number, bool spoilt) {
    const Frame& frame = frames_.at(number);
    std::size_t at = 0;
    for (const iovec& part : frame.placement.where) {
      std::memcpy(part.iov_base, frame.bytes.data() + at, part.iov_len);
      if (spoilt) std::memset(part.iov_base, 0x5a, part.iov_len);
      at += part.iov_len;
    }
  }
  void arrived(int number) {
    Frame& frame = frames_.at(number);
    (void)transfer_.arrived(peer(frame.from), frame.header, std::move(frame.placement.buffer));
  }
  void voided(int number) {
    transfer_.voided(peer(frames_.at(number).from), frames_.at(number).header);
  }
  void link(std::uint8_t of, bool up) {
    if (up) {
      transfer_.link_up(peer(of));
    } else {
      transfer_.link_down(peer(of), {});
    }
  }
  // Sets the clock to this many seconds. Sources may be silent for ten seconds.
  void tick(int seconds) {
    transfer_.on_time(pccl::Instant(std::chrono::seconds(1000 + seconds)),
                      std::chrono::seconds(10));
  }
  // Receives a peer's request for the sync that is `later` syncs after this one.
  bool asked(std::uint8_t from, int later, const std::vector<std::uint32_t>& chunks) {
    return say(from, stripes::FrameType::fetch, later,
               wire::encoded(state::Fetch{false, false, chunks}));
  }
  // Ends the sync and begins a later one that serves `to`. Returns the chunks that it gets.
  std::vector<std::uint32_t> serves(int later, std::uint8_t to) {
    (void)transfer_.end();
    wire::SyncDecision decision;
    decision.holders = {peer(0)};
    decision.receivers = {peer(to)};
    transfer_.begin({kSync.admission, kSync.sequence + static_cast<std::uint64_t>(later)}, peer(0),
                    mine_, decision, {});
    return served(to).first;
  }
  // The peer that is served asks for more.
  std::pair<std::vector<std::uint32_t>, Places> serves_more(
      int later, std::uint8_t to, const std::vector<std::uint32_t>& chunks, bool bytes) {
    (void)say(to, stripes::FrameType::fetch, later,
              wire::encoded(state::Fetch{false, bytes, chunks}));
    return served(to);
  }
  // The arrays as they are, whether a part was overwritten, and whether the hashes are theirs but
  // for chunks with the hash zero.
  [[nodiscard]] std::tuple<std::vector<nb::bytes>, bool, bool> now() const {
    std::vector<nb::bytes> arrays;
    for (const wire::Bytes& bytes : old_) arrays.push_back(to_python(bytes));
    const state::ChunkIndex index(mine_->manifest.entries);
    bool right = true;
    for (std::uint64_t chunk = 0; chunk < index.count(); ++chunk) {
      const state::ChunkRange range = index.at(chunk);
      const wire::Digest& known = mine_->manifest.chunks[chunk];
      right = right && (known == wire::Digest{} ||
                        known == state::digest({old_[range.entry].data() + range.offset,
                                                static_cast<std::size_t>(range.bytes)}));
    }
    return {std::move(arrays), mine_->mixed, right};
  }
  void go_on() { transfer_.go_on(); }
  // Ends the sync and elects other arrays, from the same holders.
  void again(const std::vector<nb::bytes>& now, std::uint8_t holders) {
    (void)transfer_.end();
    over_.reset();
    frames_.clear();
    new_.clear();
    for (const nb::bytes& bytes : now) new_.push_back(copy(bytes));
    begin(holders);
  }
  // Bytes of each block that chunks are received into.
  [[nodiscard]] std::vector<std::size_t> memory() const {
    std::vector<std::size_t> sizes;
    for (const pccl::BufferPtr& block : transfer_.memory()) sizes.push_back(block->size());
    return sizes;
  }
  [[nodiscard]] std::optional<std::pair<unsigned, std::string>> over() {
    if (const auto told = transfer_.take_events().over)
      over_ = {static_cast<unsigned>(told->code), told->reason};
    return over_;
  }
  // The arrays after the sync.
  std::vector<nb::bytes> result() {
    const std::unique_ptr<state::Update> update = transfer_.end();
    pccl::Serial serial;
    update->place(serial);
    std::map<std::string, nb::bytes> arrays;
    for (std::size_t i = 0; i < old_.size(); ++i)
      arrays.emplace(std::string(1, static_cast<char>('a' + i)), to_python(old_[i]));
    for (const state::Update::Replacement& new_one : update->replacements) {
      arrays.insert_or_assign(new_one.what.name,
                              to_python({new_one.bytes->data(), new_one.what.bytes}));
    }
    std::vector<nb::bytes> values;
    for (auto& [name, bytes] : arrays) values.push_back(std::move(bytes));
    return values;
  }

 private:
  // The chunks whose bytes are sent to that peer, and those that it is to read.
  std::pair<std::vector<std::uint32_t>, Places> served(std::uint8_t to) {
    std::vector<std::uint32_t> chunks;
    Places places;
    stripes::OutgoingFrame frame;
    while (transfer_.next(peer(to), frame)) {
      const auto header = stripes::decode(frame.header);
      if (header->type != stripes::FrameType::located) {
        chunks.push_back(header->segment);
        continue;
      }
      state::Located located;
      wire::Reader reader(frame.owned);
      reader(located);
      for (const auto& [number, at] : located.chunks)
        places.emplace_back(number, at.memory, at.offset);
    }
    return {std::move(chunks), std::move(places)};
  }
  bool say(std::uint8_t from, stripes::FrameType type, int later, wire::Bytes payload) {
    stripes::FrameHeader header;
    header.type = type;
    header.key.admission = kSync.admission;
    header.key.sequence = kSync.sequence + static_cast<std::uint64_t>(later);
    header.payload_bytes = static_cast<std::uint32_t>(payload.size());
    const iovec whole{payload.data(), payload.size()};
    header.checksum = stripes::checksum(header, {&whole, 1});
    return static_cast<bool>(transfer_.control(peer(from), header, payload));
  }
  struct Frame {
    std::uint8_t from = 0;
    stripes::FrameHeader header;
    stripes::Placement placement;
    wire::Bytes bytes;
  };
  void begin(std::uint8_t holders) {
    elected_ = hashed(new_, false);
    wire::SyncDecision decision;
    decision.step = wire::SyncStep::transfer;
    decision.content = state::content_of(elected_->manifest.entries, false);
    decision.receivers = {peer(0)};
    for (std::uint8_t i = 1; i <= holders; ++i) decision.holders.push_back(peer(i));
    transfer_.begin(kSync, peer(0), mine_, decision, {.waits = waits_});
  }
  void wake(const PeerId&) override {}
  bool is_up(const PeerId&) const override { return true; }
  std::uint64_t release(const PeerId& of, std::uint64_t) override {
    for (auto& [number, frame] : frames_) {
      if (peer(frame.from) != of || frame.placement.kind != stripes::Placement::Kind::store)
        continue;
      frame.placement = {};
      transfer_.voided(of, frame.header);
    }
    return 0;
  }
  std::uint64_t unsent(const PeerId&, std::uint64_t) const override { return 0; }
  bool is_checked(const PeerId&) const override { return false; }
  std::optional<state::SharedBytes> share(const PeerId& reader, const std::uint8_t* data,
                                          std::uint64_t bytes) override {
    if (!readers_.contains(reader)) return std::nullopt;
    for (std::uint64_t i = 0; i < old_.size(); ++i) {
      const auto offset = static_cast<std::uint64_t>(data - old_[i].data());
      if (data >= old_[i].data() && offset + bytes <= old_[i].size())
        return state::SharedBytes{i, offset};
    }
    return std::nullopt;
  }
  void stop_sharing() override {}
  std::optional<std::span<const std::uint8_t>> memory_of(const PeerId& of,
                                                         std::uint64_t number) const override {
    const auto it = shared_.find({of, number});
    if (it == shared_.end()) return std::nullopt;
    return std::span<const std::uint8_t>(it->second);
  }

  bool asked_for_bytes_ = false;
  std::map<std::pair<PeerId, std::uint64_t>, wire::Bytes> shared_;
  std::set<PeerId> readers_;
  bool waits_;
  std::vector<wire::Bytes> old_;
  std::vector<wire::Bytes> new_;
  std::shared_ptr<state::LocalState> mine_;
  std::shared_ptr<state::LocalState> elected_;
  std::map<int, Frame> frames_;
  std::optional<std::pair<unsigned, std::string>> over_;
  state::Transfer transfer_{std::make_shared<pccl::BufferPool>(0), *this, *this};
};

// The sizes of the first message of a member that returns during the second round of a sync, and of
// its messages after Welcome.
std::pair<std::size_t, std::vector<std::size_t>> rejoin_sizes(std::size_t entries,
                                                              std::size_t name_bytes) {
  pccl::peer::JoinOptions options;
  options.id = peer(1);
  pccl::peer::Session session(options);
  wire::EpochRecord record;
  record.epoch = record.admission = 1;
  record.members = {{peer(1), 1, {}, {}}};
  record.plan = *pccl::topology::make_plan(1, 1 << 19, {});
  const wire::Envelope envelope{7, 1, 0};
  const auto hear = [&](const wire::Message& message) {
    session.on_bytes(wire::encode(envelope, message));
    for (auto event = session.next(); event && *event; event = session.next()) {
    }
  };
  session.on_open();
  hear(wire::Welcome{});
  hear(wire::Log{{{1, record}}});
  wire::SyncDetail detail;
  for (std::size_t i = 0; i < entries; ++i) {
    wire::StateEntry entry;
    entry.name = std::string(name_bytes, 'x');
    detail.entries.push_back(std::move(entry));
  }
  pccl::peer::CallTable calls;
  calls.begin_admission(record.admission);
  const wire::RoundKey key{wire::RoundKind::sync_detail, 1, 0};
  calls.open(key, std::make_shared<pccl::peer::Call>()).entered = detail;
  session.say(wire::EnterRound{{key, std::move(detail)}});
  session.on_lost();
  session.on_open();
  const std::vector<wire::Bytes> first = session.take_output();
  hear(wire::Welcome{});
  session.say_again(calls.open_messages());
  std::vector<std::size_t> later;
  for (const wire::Bytes& bytes : session.take_output()) later.push_back(bytes.size());
  return {first.at(0).size(), later};
}

}  // namespace

void bind_transfer(nb::module_& m) {
  nb::class_<Receiver>(m, "Receiver")
      .def(nb::init<const std::vector<nb::bytes>&, const std::vector<nb::bytes>&, std::uint8_t,
                    bool, bool, bool>(),
           "old"_a, "new"_a, "holders"_a, "writable"_a, "overwrite"_a = false, "waits"_a = false)
      .def("next", &Receiver::next, "to"_a)
      .def("begins", &Receiver::begins, "number"_a, "holder"_a, nb::arg("chunk").none())
      .def("fill", &Receiver::fill, "number"_a, "spoilt"_a = false)
      .def("arrived", &Receiver::arrived, "number"_a)
      .def("voided", &Receiver::voided, "number"_a)
      .def("link", &Receiver::link, "holder"_a, "up"_a)
      .def("tick", &Receiver::tick, "seconds"_a)
      .def("asked", &Receiver::asked, "peer"_a, "later"_a, "chunks"_a)
      .def("serves", &Receiver::serves, "later"_a, "peer"_a)
      .def("serves_more", &Receiver::serves_more, "later"_a, "peer"_a, "chunks"_a, "bytes"_a)
      .def("asked_for_bytes", &Receiver::asked_for_bytes)
      .def("shared", &Receiver::shared, "holder"_a, "number"_a, "bytes"_a)
      .def("located", &Receiver::located, "holder"_a, "chunks"_a)
      .def("read", &Receiver::read)
      .def("let_read", &Receiver::let_read, "peer"_a)
      .def("now", &Receiver::now)
      .def("go_on", &Receiver::go_on)
      .def("again", &Receiver::again, "now"_a, "holders"_a)
      .def("memory", &Receiver::memory)
      .def("over", &Receiver::over)
      .def("result", &Receiver::result);
  m.def("rejoin_sizes", &rejoin_sizes, "entries"_a, "name_bytes"_a);
}
