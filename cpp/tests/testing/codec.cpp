// The control protocol's codec and the byte pump of links, driven with arbitrary values and
// arbitrary bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/digest/proof.h"
#include "pccl/digest/xxh3.h"
#include "pccl/link/stripe.h"
#include "pccl/memory/pipe.h"
#include "pccl/wire/messages.h"
#include "tests/testing/frames.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace wire = pccl::wire;
namespace stripes = pccl::link;

namespace {

std::span<const std::uint8_t> view(const nb::bytes& bytes) {
  return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

nb::bytes to_python(std::span<const std::uint8_t> bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

// A field visitor that fills a message from a string of bytes. Short strings make small messages.
class Filler {
 public:
  explicit Filler(std::span<const std::uint8_t> entropy) : entropy_(entropy) {}

  template <class... Ts>
  void operator()(Ts&... values) {
    (fill(values), ...);
  }
  std::uint8_t byte() { return at_ < entropy_.size() ? entropy_[at_++] : 0; }

 private:
  template <class T>
  void fill(T& value) {
    if constexpr (std::is_same_v<T, bool>) {
      value = byte() % 2 == 1;
    } else if constexpr (std::is_unsigned_v<T>) {
      value = 0;
      for (std::size_t i = 0; i < sizeof(T); ++i) {
        value = static_cast<T>(value | (static_cast<T>(byte()) << (8 * i)));
      }
    } else if constexpr (wire::WireEnum<T>) {
      value = static_cast<T>(byte() % enum_count(T{}));
    } else {
      T::fields(value, *this);
    }
  }
  template <class Kind>
  void fill(pccl::Bits128<Kind>& bits) {
    for (std::uint8_t& part : bits.bytes) part = byte();
  }
  void fill(std::string& text) {
    text.clear();
    for (std::size_t left = byte() % 40; left > 0; --left)
      text.push_back(static_cast<char>(byte()));
  }
  template <class T>
  void fill(std::vector<T>& list) {
    list.resize(byte() % 4);
    for (T& item : list) fill(item);
  }
  template <class... Ts>
  void fill(std::variant<Ts...>& choice) {
    const std::size_t index = byte() % sizeof...(Ts);
    emplace(choice, index, std::index_sequence_for<Ts...>{});
  }
  template <class... Ts, std::size_t... Is>
  void emplace(std::variant<Ts...>& choice, std::size_t index, std::index_sequence<Is...>) {
    ((index == Is ? fill(choice.template emplace<Is>()) : void()), ...);
  }

  std::span<const std::uint8_t> entropy_;
  std::size_t at_ = 0;
};

// A field visitor that adds up the memory of a message.
class Weigher {
 public:
  template <class... Ts>
  void operator()(const Ts&... values) {
    (add(values), ...);
  }
  std::size_t bytes = 0;

 private:
  template <class T>
  void add(const T& value) {
    if constexpr (!std::is_unsigned_v<T> && !wire::WireEnum<T>) T::fields(value, *this);
  }
  template <class Kind>
  void add(const pccl::Bits128<Kind>&) {}
  void add(const std::string& text) { bytes += text.capacity(); }
  template <class T>
  void add(const std::vector<T>& list) {
    bytes += list.capacity() * sizeof(T);
    for (const T& item : list) add(item);
  }
  template <class... Ts>
  void add(const std::variant<Ts...>& choice) {
    std::visit([this](const auto& value) { add(value); }, choice);
  }
};

std::size_t weight(const wire::Message& message) {
  Weigher weigher;
  std::visit([&](const auto& body) { weigher(body); }, message);
  return weigher.bytes;
}

template <std::size_t... Is>
void fill_alternative(wire::Message& message, std::size_t index, Filler& filler,
                      std::index_sequence<Is...>) {
  ((index == Is ? filler(message.template emplace<Is>()) : void()), ...);
}

constexpr std::size_t kTypes = std::variant_size_v<wire::Message>;

wire::Frame arbitrary_frame(std::size_t type, std::span<const std::uint8_t> entropy) {
  Filler filler(entropy);
  wire::Frame frame;
  filler(frame.envelope.run, frame.envelope.term, frame.envelope.ordinal);
  fill_alternative(frame.message, type, filler, std::make_index_sequence<kTypes>{});
  return frame;
}

// -- control frames

// A frame of this type made from `entropy`: its bytes, and whether reading them gives the same
// frame.
std::tuple<nb::bytes, bool> control_round_trip(std::size_t type, const nb::bytes& entropy) {
  if (type >= kTypes) throw nb::value_error("no such message type");
  const wire::Frame frame = arbitrary_frame(type, view(entropy));
  const wire::Bytes bytes = wire::encode(frame.envelope, frame.message);
  wire::FrameReader reader;
  reader.feed(bytes);
  wire::Frame again;
  const auto got = reader.next(again);
  const bool same = got && *got && again == frame;
  return {to_python(bytes), same};
}

// Feeds `data` in pieces of the given sizes (the rest in one). Returns the frames read, encoded
// again; why the stream was refused, or ""; and the most memory any one message took.
std::tuple<std::vector<nb::bytes>, std::string, std::size_t> control_decode(
    const nb::bytes& data, const std::vector<std::size_t>& pieces, std::size_t max_payload) {
  std::vector<nb::bytes> frames;
  std::size_t heaviest = 0;
  wire::FrameReader reader(max_payload);
  std::span<const std::uint8_t> rest = view(data);
  std::size_t piece = 0;
  while (true) {
    const std::size_t size =
        piece < pieces.size() ? std::min(pieces[piece], rest.size()) : rest.size();
    ++piece;
    reader.feed(rest.first(size));
    rest = rest.subspan(size);
    while (true) {
      wire::Frame frame;
      const auto got = reader.next(frame);
      heaviest = std::max(heaviest, weight(frame.message));
      if (!got) return {std::move(frames), got.error().reason, heaviest};
      if (!*got) break;
      frames.push_back(to_python(wire::encode(frame.envelope, frame.message)));
    }
    if (rest.empty() && piece >= pieces.size()) break;
  }
  return {std::move(frames), "", heaviest};
}

// Fixed messages, for the golden bytes.
nb::bytes control_sample(const std::string& name) {
  const wire::Envelope envelope{0x1122334455667788, 3, 42};
  wire::Message message;
  pccl::PeerId id;
  for (std::size_t i = 0; i < id.bytes.size(); ++i) id.bytes[i] = static_cast<std::uint8_t>(i + 1);
  if (name == "join") {
    wire::Join join;
    join.id = id;
    join.waiting = true;
    message = join;
  } else if (name == "heartbeat") {
    message = wire::Heartbeat{{5, 6, 7, 8}, true, {750, 9}};
  } else if (name == "ask_status") {
    message = wire::AskStatus{};
  } else if (name == "status_part") {
    message = wire::StatusPart{{1, 2, 3}, true};
  } else if (name == "command") {
    message = wire::Command{wire::CommandKind::drain, "a"};
  } else if (name == "command_result") {
    message = wire::CommandResult{true, "ok"};
  } else if (name == "drain") {
    message = wire::Drain{};
  } else if (name == "enter_round") {
    message = wire::EnterRound{{{wire::RoundKind::barrier, 7, 2}, {}}};
  } else if (name == "measured") {
    message = wire::EnterRound{
        {{wire::RoundKind::optimize, 7, 2},
         wire::Measurements{{{id, {false, 62'500, 100'000}}, {id, {true, 0, 0}}}, {125'000, 3}}}};
  } else if (name == "verdict") {
    message = wire::Log{{{9, wire::Verdict{{7, true, 5, 1}, 8, pccl::Code::ok, true, {}, {}, {}}}}};
  } else if (name == "abort_request") {
    message = wire::AbortRequest{wire::OpKey{7, false, 0, 3}, pccl::Code::peer_lost, id};
  } else if (name == "log_part") {
    message = wire::LogPart{
        {{9, wire::Verdict{{7, true, 5, 1}, 8, pccl::Code::ok, true, {}, {}, {}}}}, true};
  } else if (name == "request_log") {
    message = wire::RequestLog{};
  } else if (name == "promise") {
    message = wire::Promise{
        {{6, {9, wire::Verdict{{7, true, 5, 1}, 8, pccl::Code::ok, true, {}, {}, {}}}}}};
  } else if (name == "propose") {
    message =
        wire::Propose{{9, wire::Verdict{{7, true, 5, 1}, 8, pccl::Code::ok, true, {}, {}, {}}}};
  } else if (name == "accept") {
    message = wire::Accept{9};
  } else if (name == "not_serving") {
    message = wire::NotServing{true};
  } else if (name == "may_found") {
    message = wire::MayFound{};
  } else if (name == "ask_promise") {
    message = wire::AskPromise{};
  } else if (name == "link_report") {
    message = wire::LinkReport{id, wire::LinkState::silent, 8, "why"};
  } else {
    throw nb::value_error("no such sample");
  }
  return to_python(wire::encode(envelope, message));
}

nb::bytes link_sample() {
  stripes::FrameHeader header;
  header.type = stripes::FrameType::data;
  header.final = true;
  header.payload_bytes = 0x1000;
  header.signature = 0xdeadbeef;
  header.key = {7, true, 5, 1};
  header.attempt = 8;
  header.segment = 3;
  header.checksum = 0x0102030405060708;
  return to_python(stripes::encode(header));
}

// A link frame's header with a valid check.
nb::bytes link_seal(const nb::bytes& header) {
  wire::Bytes bytes(view(header).begin(), view(header).end());
  if (bytes.size() != stripes::kFrameHeaderBytes) throw nb::value_error("not a header's size");
  stripes::FrameHeader fields;
  wire::Reader reader(bytes);
  reader(fields);
  if (!reader.complete()) throw nb::value_error("not a header's fields");
  const auto sealed = stripes::encode(fields);
  return to_python(sealed);
}

// -- link frames

// The user of a test's stripes: sends the given frames, and places arriving ones by `choices`.
class Player final : public stripes::Traffic {
 public:
  explicit Player(std::span<const std::uint8_t> choices) : choices_(choices) {}

  stripes::Placement place(stripes::Stripe&, const stripes::FrameHeader& header) override {
    stripes::Placement placement;
    // Drain absurd lengths instead of allocating memory for them.
    if (header.payload_bytes > (1U << 20)) {
      placement.kind = stripes::Placement::Kind::drain;
      return placement;
    }
    switch (choices_.byte() % 8) {
      case 7:
        placement.kind = stripes::Placement::Kind::drain;
        break;
      case 6:
        if (!held_) {
          placement.kind = stripes::Placement::Kind::hold;
          held_ = true;
          return placement;
        }
        [[fallthrough]];
      default:
        placement.kind = stripes::Placement::Kind::store;
        memory_.emplace_back(header.payload_bytes);
        // Sometimes in two parts.
        const std::size_t cut = choices_.byte() % 2 == 0 ? 0 : memory_.back().size() / 2;
        placement.where = {{memory_.back().data(), cut},
                           {memory_.back().data() + cut, memory_.back().size() - cut}};
        placement.token = 1;
        break;
    }
    held_ = false;
    return placement;
  }
  pccl::Status arrived(stripes::Stripe&, const stripes::FrameHeader& header, std::uint64_t,
                       pccl::Buffer) override {
    arrived_.emplace_back(header.segment, memory_.back());
    return {};
  }
  void voided(stripes::Stripe&, const stripes::FrameHeader&, std::uint64_t) override { ++voided_; }
  void drained(stripes::Stripe&, const stripes::FrameHeader&) override { ++drained_; }
  void interrupted(stripes::Stripe&, const stripes::FrameHeader&, std::uint64_t) override {
    ++interrupted_;
  }
  pccl::Status control(stripes::Stripe&, const stripes::FrameHeader& header,
                       std::span<const std::uint8_t> payload) override {
    control_.emplace_back(static_cast<std::uint32_t>(header.type),
                          wire::Bytes(payload.begin(), payload.end()));
    return {};
  }
  bool next(stripes::Stripe&, stripes::OutgoingFrame& frame) override {
    if (to_send_.empty()) return false;
    frame = std::move(to_send_.front());
    to_send_.pop_front();
    return true;
  }

  std::list<stripes::OutgoingFrame> to_send_;
  std::vector<std::pair<std::uint32_t, wire::Bytes>> arrived_;
  std::vector<std::pair<std::uint32_t, wire::Bytes>> control_;
  std::uint32_t voided_ = 0;
  std::uint32_t drained_ = 0;
  std::uint32_t interrupted_ = 0;

 private:
  Filler choices_;
  bool held_ = false;
  std::list<wire::Bytes> memory_;
};

using Frames = std::vector<std::tuple<std::uint32_t, nb::bytes>>;

Frames frames_to_python(const std::vector<std::pair<std::uint32_t, wire::Bytes>>& frames) {
  Frames out;
  for (const auto& [number, bytes] : frames) out.emplace_back(number, to_python(bytes));
  return out;
}

// The bytes that a stripe writes for these frames: (segment, payload) as data with a checksum, an
// empty payload as a heartbeat. `pieces`: the sizes of writes, repeated. `release_after`: the
// number of writes after which the operation releases its memory, or -1.
nb::bytes link_write(const Frames& frames, const std::vector<std::size_t>& pieces,
                     int release_after) {
  Player player({});
  std::list<wire::Bytes> payloads;
  for (const auto& [segment, payload] : frames) {
    if (payload.size() == 0) {
      player.to_send_.push_back(stripes::make_frame({}));
      continue;
    }
    const auto bytes = view(payload);
    wire::Bytes& kept = payloads.emplace_back(bytes.begin(), bytes.end());
    player.to_send_.push_back(pccl::tests::data_frame(segment, kept));
  }
  stripes::Stripe stripe(1, player);
  wire::Bytes written;
  for (std::size_t i = 0;; ++i) {
    if (release_after >= 0 && i == static_cast<std::size_t>(release_after)) {
      player.to_send_.clear();
      (void)stripe.release(1);
      for (wire::Bytes& payload : payloads) std::fill(payload.begin(), payload.end(), 0xdd);
    }
    const auto parts = stripe.outgoing();
    std::size_t left = pieces.empty() ? std::size_t{1} << 20 : pieces[i % pieces.size()];
    std::size_t sent = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(left, part.iov_len);
      const auto* from = static_cast<const std::uint8_t*>(part.iov_base);
      written.insert(written.end(), from, from + size);
      left -= size;
      sent += size;
    }
    if (parts.empty()) break;
    stripe.sent(sent);
  }
  return to_python(written);
}

// Feeds `data` to a stripe in pieces of these sizes, repeated. Returns the data frames that
// arrived, the other frames, the number of void frames, and why the stripe was dropped, or "".
std::tuple<Frames, Frames, std::uint32_t, std::string> link_read(
    const nb::bytes& data, const std::vector<std::size_t>& pieces, const nb::bytes& choices,
    int release_after) {
  Player player(view(choices));
  stripes::Stripe stripe(1, player);
  std::span<const std::uint8_t> rest = view(data);
  std::string error;
  for (std::size_t i = 0; !rest.empty() && error.empty(); ++i) {
    if (release_after >= 0 && i == static_cast<std::size_t>(release_after)) (void)stripe.release(1);
    while (stripe.held() && error.empty()) {
      const pccl::Status status = stripe.resume();
      if (!status) error = status.error().reason;
    }
    if (!error.empty()) break;
    const auto parts = stripe.incoming();
    std::size_t left =
        std::min(rest.size(), pieces.empty() ? rest.size() : pieces[i % pieces.size()]);
    std::size_t taken = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(left, part.iov_len);
      if (size == 0) continue;
      std::memcpy(part.iov_base, rest.data() + taken, size);
      taken += size;
      left -= size;
    }
    rest = rest.subspan(taken);
    const pccl::Status status = stripe.received(taken);
    if (!status) error = status.error().reason;
  }
  while (stripe.held() && error.empty()) {
    const pccl::Status status = stripe.resume();
    if (!status) error = status.error().reason;
  }
  return {frames_to_python(player.arrived_), frames_to_python(player.control_), player.voided_,
          error};
}

nb::bytes proof(nb::bytes bytes, const std::vector<std::uint64_t>& about) {
  pccl::HostKey key;
  if (bytes.size() != key.bytes.size()) throw nb::value_error("a key has 16 bytes");
  std::memcpy(key.bytes.data(), bytes.c_str(), key.bytes.size());
  const pccl::Proof made = pccl::digest::proof(key, about);
  return nb::bytes(reinterpret_cast<const char*>(made.bytes.data()), made.bytes.size());
}

// XXH3 by each instruction set of this processor: (name, 64 bits of the pieces, 128 bits of all),
// and once more with the 128 bits from a copy.
std::vector<std::tuple<std::string, std::uint64_t, std::array<std::uint64_t, 2>>> xxh3(
    const std::vector<nb::bytes>& pieces) {
  std::vector<iovec> parts;
  std::vector<std::uint8_t> all;
  for (const nb::bytes& piece : pieces) {
    parts.push_back(stripes::vec(piece.data(), piece.size()));
    all.insert(all.end(), view(piece).begin(), view(piece).end());
  }
  std::span<const std::uint8_t> head;
  if (!parts.empty()) {
    head = view(pieces.front());
    parts.erase(parts.begin());
  }
  std::vector<std::tuple<std::string, std::uint64_t, std::array<std::uint64_t, 2>>> hashes;
  for (const pccl::digest::Xxh3* set : pccl::digest::xxh3_sets()) {
    const pccl::digest::Hash128 whole = set->hash128(all.data(), all.size());
    hashes.push_back({set->name,
                      set->hash64(head.data(), head.size(), parts.data(), parts.size()),
                      {whole.high, whole.low}});
    std::vector<std::uint8_t> to(all.size());
    const pccl::digest::Hash128 copied = set->copy128(to.data(), all.data(), all.size());
    if (to != all) throw nb::value_error("the copy differs");
    hashes.push_back({set->name, std::get<1>(hashes.back()), {copied.high, copied.low}});
  }
  return hashes;
}

pccl::memory::RegionPtr pipe_end() {
  std::shared_ptr<void> memory(std::aligned_alloc(4096, pccl::memory::kPipeEndBytes), std::free);
  std::memset(memory.get(), 0, pccl::memory::kPipeEndBytes);
  auto* bytes = static_cast<std::uint8_t*>(memory.get());
  return std::make_shared<pccl::memory::Region>(bytes, pccl::memory::kPipeEndBytes, -1,
                                                std::move(memory));
}

// Sends `data` through a pipe, with alternating reads and writes of these sizes (of `pieces` parts
// each). Returns the bytes read.
nb::bytes pipe_play(nb::bytes data, const std::vector<std::size_t>& writes,
                    const std::vector<std::size_t>& reads, std::size_t pieces) {
  if (writes.empty() || reads.empty() || pieces == 0) throw nb::value_error("nothing to do");
  const pccl::memory::RegionPtr a = pipe_end();
  const pccl::memory::RegionPtr b = pipe_end();
  pccl::memory::Pipe here(a, b);
  pccl::memory::Pipe there(b, a);
  std::vector<std::uint8_t> full(pccl::memory::kPipeBytes);
  const iovec all{full.data(), full.size()};
  if (there.read({&all, 1}) != -EAGAIN ||
      here.write({&all, 1}) != static_cast<ssize_t>(full.size()) ||
      here.write({&all, 1}) != -EAGAIN ||
      there.read({&all, 1}) != static_cast<ssize_t>(full.size())) {
    throw std::runtime_error("empty, full and empty again");
  }
  const auto parts = [&](std::uint8_t* at, std::size_t size) {
    std::vector<iovec> cut;
    for (std::size_t i = 0; i < pieces; ++i)
      cut.push_back({at + size * i / pieces, size * (i + 1) / pieces - size * i / pieces});
    return cut;
  };
  std::vector<std::uint8_t> in(view(data).begin(), view(data).end());
  std::vector<std::uint8_t> out(in.size());
  std::size_t written = 0;
  std::size_t read = 0;
  const auto move = [&](std::size_t& done, std::size_t size, auto run) {
    if (size == 0) return;
    const ssize_t moved = run(size);
    if (moved < 0) throw std::runtime_error("room or bytes, and it does not move");
    done += static_cast<std::size_t>(moved);
  };
  for (std::size_t i = 0; read < in.size(); ++i) {
    move(written, std::min(in.size() - written, writes[i % writes.size()]),
         [&](std::size_t size) { return here.write(parts(in.data() + written, size)); });
    move(read, std::min(in.size() - read, reads[i % reads.size()]),
         [&](std::size_t size) { return there.read(parts(out.data() + read, size)); });
  }
  return to_python(out);
}

// Two threads send `bytes` each way in moves of up to `largest`. An idle thread sleeps until it is
// rung. Returns the number of sleeps.
std::size_t pipe_race(std::uint64_t bytes, std::uint64_t largest, std::uint64_t seed) {
  struct End {
    std::unique_ptr<pccl::memory::Pipe> pipe;
    int bell = -1;
    std::uint64_t written = 0;
    std::uint64_t read = 0;
    std::size_t sleeps = 0;
    bool wrong = false;
  };
  const pccl::memory::RegionPtr a = pipe_end();
  const pccl::memory::RegionPtr b = pipe_end();
  std::array<End, 2> ends;
  ends[0].pipe = std::make_unique<pccl::memory::Pipe>(a, b);
  ends[1].pipe = std::make_unique<pccl::memory::Pipe>(b, a);
  for (End& end : ends) end.bell = ::eventfd(0, EFD_CLOEXEC);
  const auto run = [&](std::size_t which) {
    End& mine = ends[which];
    End& theirs = ends[1 - which];
    std::mt19937_64 random(seed + which);
    std::vector<std::uint8_t> buffer(largest);
    while (mine.written < bytes || mine.read < bytes) {
      mine.pipe->wake_up();
      const std::uint64_t before = mine.pipe->moved();
      if (mine.written < bytes && random() % 3 != 0) {
        const std::size_t size = std::min(bytes - mine.written, 1 + random() % largest);
        for (std::size_t i = 0; i < size; ++i)
          buffer[i] = static_cast<std::uint8_t>((mine.written + i) % 251);
        const iovec part{buffer.data(), size};
        mine.written +=
            static_cast<std::uint64_t>(std::max<ssize_t>(mine.pipe->write({&part, 1}), 0));
      }
      if (random() % 3 != 0) {
        const iovec part{buffer.data(), 1 + random() % largest};
        const ssize_t got = mine.pipe->read({&part, 1});
        for (ssize_t i = 0; i < got; ++i)
          mine.wrong = mine.wrong || buffer[static_cast<std::size_t>(i)] !=
                                         (mine.read + static_cast<std::uint64_t>(i)) % 251;
        mine.read += static_cast<std::uint64_t>(std::max<ssize_t>(got, 0));
      }
      const std::uint64_t one = 1;
      if (mine.pipe->must_ring()) (void)!::write(theirs.bell, &one, sizeof one);
      if (mine.pipe->moved() != before || (mine.written == bytes && mine.read == bytes)) continue;
      if (!mine.pipe->fall_asleep(true, mine.written < bytes)) continue;
      ++mine.sleeps;
      std::uint64_t rung = 0;
      (void)!::read(mine.bell, &rung, sizeof rung);
    }
  };
  {
    const nb::gil_scoped_release others_run;
    std::thread other([&] { run(1); });
    run(0);
    other.join();
  }
  for (const End& end : ends) ::close(end.bell);
  if (ends[0].wrong || ends[1].wrong) throw std::runtime_error("wrong bytes");
  return ends[0].sleeps + ends[1].sleeps;
}

}  // namespace

void bind_codec(nb::module_& m) {
  m.attr("control_types") = kTypes;
  m.def("control_round_trip", &control_round_trip, "type"_a, "entropy"_a);
  m.def("control_decode", &control_decode, "data"_a, "pieces"_a, "max_payload"_a);
  m.attr("PROTOCOL_VERSION") = pccl::wire::kProtocolVersion;
  m.def("control_sample", &control_sample, "name"_a);
  m.def("pipe_play", &pipe_play, "data"_a, "writes"_a, "reads"_a, "pieces"_a);
  m.def("pipe_race", &pipe_race, "bytes"_a, "largest"_a, "seed"_a);
  m.def("proof", &proof, "key"_a, "about"_a);
  m.def("xxh3", &xxh3, "pieces"_a);
  m.def("link_sample", &link_sample);
  m.def("link_seal", &link_seal, "header"_a);
  m.def("link_write", &link_write, "frames"_a, "pieces"_a, "release_after"_a = -1);
  m.def("link_read", &link_read, "data"_a, "pieces"_a, "choices"_a, "release_after"_a = -1);
}
