// The links of one peer: connections that send anything, before and after the handshake, during an
// operation or a sync. The other end is a member of the run.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "fuzz.h"
#include "pccl/peer/engine.h"
#include "pccl/topology/plan.h"

namespace pccl::fuzz {
namespace {

constexpr std::uint64_t kRun = 77;
constexpr std::size_t kElements = 40'000;    // more than is sent eagerly
constexpr std::size_t kMostBytes = 8 << 20;  // given to one run

class World {
 public:
  // Ranks 0 (this peer), 1 and 2, which joined later and dial it. `sync`: a sync, otherwise
  // another operation.
  World(bool sync, std::uint8_t op) : engine_(options(), std::make_shared<BufferPool>(1 << 20)) {
    engine_.start(now_);
    (void)engine_.take_actions();
    engine_.on_control_open(now_);
    tell(wire::Welcome{1, false, 0, {}});
    wire::EpochRecord record;
    record.epoch = record.admission = record.abort_floor = kEpoch;
    for (std::uint8_t id = 0; id < 3; ++id)
      record.members.push_back({peer(id + 1U), id + 1U, {}, {}});
    record.plan = *topology::make_plan(3, 64 << 10, {});
    log(record);
    must(engine_.standing() == peer::Standing::member, "it is let in");
    for (std::uint8_t from = 2; from <= 3; ++from) greet(from, 1, 0);
    if (sync) {
      begin_sync();
    } else {
      peer::OperationRequest request;
      request.arrays = {{sums_.data(), sums_.data(), kElements, DataType::float32}};
      if (op % 4 == 1) {
        request.kind = collective::Kind::all_to_all;
        request.arrays = {{parts_.data(), received_.data(), kElements, DataType::float32}};
        request.parts = 3;
      }
      if (op % 4 == 3) request.kind = collective::Kind::broadcast;
      request.root = 1;
      request.rerun = true;
      if (op % 4 == 2) request.quantization = {.code = reduce::CodeType::bits8, .block = 64};
      operation_ = engine_.start_operation(std::move(request), now_);
      must(!operation_->done, "it waits for the others");
    }
    settle();
  }

  ~World() {
    engine_.leave("over", now_);
    (void)engine_.take_actions();
    // There was no commit, so the input must be unchanged.
    for (const std::vector<float>* input : {&sums_, &parts_})
      must(std::all_of(input->begin(), input->end(), [](float x) { return x == 1.0F; }),
           "inputs stay");
    must(std::all_of(weights_.begin(), weights_.end(), [](std::uint8_t x) { return x == 5; }),
         "the state stays");
  }

  void step(Script& script) {
    const std::uint8_t what = script.byte();
    const std::size_t which = script.byte() % stripes_.size();
    const std::uint64_t stripe = stripes_[which];
    switch (what % 16) {
      case 0:  // a stranger connects
        stripes_[which] = next_stripe_++;
        engine_.connections(now_).on_accepted(stripes_[which], {.local = true});
        break;
      case 1:
        engine_.connections(now_).on_stripe_failed(stripe,
                                                   {Code::unreachable, "closed by the other end"});
        break;
      case 2:
        now_ += std::chrono::milliseconds(50 * script.byte());
        tell(wire::Heartbeat{});
        engine_.on_time(now_);
        break;
      case 3: {  // a handshake that may be valid
        const std::uint8_t bits = script.byte();
        stripes_[which] = next_stripe_++;
        engine_.connections(now_).on_accepted(stripes_[which], {.local = true});
        hello(stripes_[which], static_cast<std::uint8_t>(2 + bits % 3), 1 + bits / 4 % 4,
              bits / 16 % 4, bits % 64 < 32, bits == 255);
        break;
      }
      case 4:  // raw bytes
        feed(stripe, script.piece());
        break;
      case 5:
        log_plan();
        break;
      default:
        frame(stripe, script);
    }
    settle();
  }

 private:
  static constexpr std::uint64_t kEpoch = 4;

  static peer::EngineOptions options() {
    peer::EngineOptions options;
    options.join.id = peer(1);
    options.join.waiting = true;
    options.settings.shm = false;
    options.settings.checksum = Checksum::never;
    return options;
  }

  void tell(const wire::Message& message) {
    engine_.on_control_bytes(wire::encode({kRun, 1, 0}, message), now_);
  }
  void log(const wire::EpochRecord& record) { tell(wire::Log{{{++ordinal_, record}}}); }

  // Restarts the operations in a new epoch.
  void log_plan() {
    if (engine_.session().record() == nullptr || engine_.session().record()->epoch > kEpoch + 3)
      return;
    wire::EpochRecord record = *engine_.session().record();
    record.cause = wire::Cause::plan;
    record.abort_floor = ++record.epoch;
    log(record);
  }

  void begin_sync() {
    state::LocalEntry entry;
    entry.what.name = "weights";
    entry.what.kind = "uint8";
    entry.what.shape = {weights_.size()};
    entry.what.bytes = weights_.size();
    entry.data = entry.writable = weights_.data();
    peer::SyncRequest request;
    Serial serial;
    request.state = *state::hash({entry}, serial, {});
    operation_ = engine_.start_sync(request, now_);
    for (const wire::RoundKind kind : {wire::RoundKind::sync, wire::RoundKind::sync_detail}) {
      wire::Outcome outcome;
      outcome.key = {kind, kEpoch, 0};
      outcome.sync.step =
          kind == wire::RoundKind::sync ? wire::SyncStep::detail : wire::SyncStep::transfer;
      outcome.sync.content = state::content_of(request.state->manifest.entries, false);
      outcome.sync.content.low ^= 1;
      outcome.sync.holders = {peer(2)};
      outcome.sync.receivers = {peer(1), peer(3)};
      tell(wire::Log{{{++ordinal_, outcome}}});
    }
  }

  void greet(std::uint8_t from, std::uint64_t generation, std::uint32_t stripe) {
    const std::uint64_t id = next_stripe_++;
    stripes_.push_back(id);
    engine_.connections(now_).on_accepted(id, {.local = true});
    hello(id, from, generation, stripe, true, false);
    must(engine_.links().is_established(id), "a member's handshake is taken");
  }

  void hello(std::uint64_t stripe, std::uint8_t from, std::uint64_t generation,
             std::uint32_t number, bool keeps, bool memory) {
    link::FrameHeader header;
    header.type = link::FrameType::hello;
    const wire::Bytes payload = wire::encoded(
        link::Hello{kRun, peer(from), peer(1), generation, number, keeps, memory, 1000});
    send(stripe, header, payload, false);
  }

  // A header with a valid check, and a payload of its length.
  void frame(std::uint64_t stripe, Script& script) {
    link::FrameHeader header;
    header.type = static_cast<link::FrameType>(script.byte() % enum_count(link::FrameType{}));
    const std::uint8_t flags = script.byte();
    header.final = flags & 1;
    header.eager = flags & 2;
    header.key.admission = flags & 4 ? script.byte() : kEpoch;
    header.key.tagged = flags & 8;
    header.key.tag = flags & 8 ? script.byte() : 0;
    header.key.sequence = script.byte() % 8;
    header.attempt = engine_.session().record() == nullptr ? 0 : engine_.session().record()->epoch;
    if (flags & 16) header.attempt = script.byte();
    header.segment = script.byte();
    if (header.segment >= 250) header.segment = 0xffffffff;
    header.credit = script.pair();
    if (header.credit >= 0xfff0) header.credit = 0xffffffff - (0xffff - header.credit);
    // Often the honest value, so that the script does not only test disagreement.
    header.signature = flags & 32 ? script.pair() : signature_;
    const auto given = script.piece();
    wire::Bytes payload(given.begin(), given.end());
    const bool data = link::carries_data(header.type);
    // A whole segment is too long for a script.
    if (data && (flags & 64)) payload.resize(script.byte() * 2048U);
    payload.resize(std::min<std::size_t>(payload.size(), data ? 1 << 20 : link::kMaxSmallPayload));
    send(stripe, header, payload, flags & 128);
  }

  void send(std::uint64_t stripe, link::FrameHeader header, const wire::Bytes& payload,
            bool given_up) {
    header.payload_bytes = static_cast<std::uint32_t>(payload.size());
    const iovec whole{const_cast<std::uint8_t*>(payload.data()), payload.size()};
    if (!link::carries_data(header.type)) header.checksum = link::checksum(header, {&whole, 1});
    const auto head = link::encode(header);
    feed(stripe, head);
    feed(stripe, payload);
    if (!link::carries_data(header.type)) return;
    feed(stripe, wire::encoded(given_up ? link::kTrailerVoid : link::kTrailerValid));
  }

  void feed(std::uint64_t id, std::span<const std::uint8_t> bytes) {
    fed_ += bytes.size();
    while (!bytes.empty() && fed_ < kMostBytes) {
      link::Stripe* stripe = engine_.stripe(id);
      if (stripe == nullptr) return;
      const auto into = stripe->incoming();
      std::size_t taken = 0;
      for (const iovec& part : into) {
        const std::size_t size = std::min(part.iov_len, bytes.size());
        if (size > 0) std::copy_n(bytes.begin(), size, static_cast<std::uint8_t*>(part.iov_base));
        bytes = bytes.subspan(size);
        taken += size;
      }
      if (taken == 0) return;  // held
      if (const Status status = stripe->received(taken); !status) {
        engine_.connections(now_).on_stripe_failed(id, status.error());
        return;
      }
    }
  }

  // Acts as the shell, and reads outgoing bytes as the other end would.
  void settle() {
    for (int turn = 0; turn < 100; ++turn) {
      peer::EngineActions actions = engine_.take_actions();
      for (const wire::Bytes& bytes : actions.control) read_control(bytes);
      for (const std::uint64_t id : actions.flush) drain(id);
      for (const std::uint64_t id : actions.resume) {
        link::Stripe* stripe = engine_.stripe(id);
        if (stripe == nullptr) continue;
        if (const Status status = stripe->resume(); !status)
          engine_.connections(now_).on_stripe_failed(id, status.error());
      }
      for (const link::DialRequest& dial : actions.dials)
        engine_.connections(now_).on_dial_failed(dial.token, "nobody");
      if (actions.flush.empty() && actions.resume.empty() && actions.dials.empty()) break;
    }
    (void)engine_.next_deadline();
  }

  void read_control(const wire::Bytes& bytes) {
    wire::FrameReader reader;
    reader.feed(bytes);
    wire::Frame frame;
    const Result<bool> got = reader.next(frame);
    must(got && *got, "what it says to the master can be read");
  }

  void drain(std::uint64_t id) {
    link::Stripe* stripe = engine_.stripe(id);
    for (int i = 0; stripe != nullptr && i < 64; ++i) {
      std::size_t bytes = 0;
      const auto parts = stripe->outgoing();
      for (const iovec& part : parts) bytes += part.iov_len;
      // A frame that it sends shows the honest signature.
      if (!parts.empty() && parts[0].iov_len == link::kFrameHeaderBytes) {
        const auto* head = static_cast<const std::uint8_t*>(parts[0].iov_base);
        const auto header = link::decode(
            std::span<const std::uint8_t, link::kFrameHeaderBytes>(head, link::kFrameHeaderBytes));
        if (header && header->signature != 0) signature_ = header->signature;
      }
      if (bytes == 0) return;
      stripe->sent(bytes);
      stripe = engine_.stripe(id);
    }
  }

  peer::Engine engine_;
  Instant now_{std::chrono::seconds(1000)};
  std::uint64_t ordinal_ = 0;
  std::vector<std::uint64_t> stripes_;
  std::uint64_t next_stripe_ = 1;
  std::uint32_t signature_ = 0;
  std::size_t fed_ = 0;
  std::vector<float> sums_ = std::vector<float>(kElements, 1.0F);
  std::vector<float> parts_ = std::vector<float>(3 * kElements, 1.0F);
  std::vector<float> received_ = std::vector<float>(3 * kElements);
  wire::Bytes weights_ = wire::Bytes(3000, 5);
  peer::CallPtr operation_;
};

}  // namespace
}  // namespace pccl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pccl::fuzz;
  Script script(data, size);
  const std::uint8_t mode = script.byte();
  World world(mode % 4 == 1, mode / 4);
  for (int steps = 0; !script.empty() && steps < 300; ++steps) world.step(script);
  return 0;
}
