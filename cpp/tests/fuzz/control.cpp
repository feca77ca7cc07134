// Control messages: arbitrary bytes for the reader, and a master with members, newcomers and
// strangers that send arbitrary messages in any order.
#include <utility>
#include <vector>

#include "fuzz.h"
#include "pccl/master/master.h"
#include "pccl/topology/plan.h"

namespace pccl::fuzz {
namespace {

constexpr std::uint64_t kRun = 77;
constexpr std::uint32_t kTerm = 3;
constexpr std::uint8_t kMembers = 3;  // connections 1 to kMembers belong to members of group 0

// A frame that was read must give the same frame when it is written and read again.
void read_stream(std::span<const std::uint8_t> bytes) {
  wire::FrameReader reader(wire::kMaxFirstPayload);
  const std::size_t cut = bytes.size() / 2;
  for (const auto part : {bytes.first(cut), bytes.subspan(cut)}) {
    reader.feed(part);
    for (;;) {
      wire::Frame frame;
      const Result<bool> next = reader.next(frame);
      if (!next) return;
      if (!*next) break;
      wire::FrameReader again;
      again.feed(wire::encode(frame.envelope, frame.message));
      wire::Frame same;
      const Result<bool> back = again.next(same);
      must(back && *back && same == frame, "a message comes back as it was");
    }
  }
}

class World {
 public:
  // `remembers`: the master knows its group; otherwise it has just been restarted.
  explicit World(bool remembers) : master_(options(), kRun, kTerm) {
    for (std::uint8_t id = 1; id <= 2 * kMembers; ++id) connect(id);
    if (!remembers) return;
    for (std::uint8_t id = 1; id <= kMembers; ++id) {
      wire::Join join;
      join.id = peer(id);
      join.min_peers = kMembers;
      join.waiting = true;
      join.addresses = {{"192.0.2.1", 1}};
      say(id, 0, join);
    }
    settle();
    must(master_.group(0) != nullptr && master_.group(0)->record().members.size() == kMembers,
         "the group starts");
  }

  void step(Script& script) {
    const std::uint8_t what = script.byte();
    const master::ConnectionId id = script.byte() % (2 * kMembers) + 1U;
    switch (what % 8) {
      case 0:
        master_.on_disconnect(id, now_);
        connect(id);
        break;
      case 1:
        now_ += std::chrono::milliseconds(10 * script.byte());
        master_.on_time(now_);
        break;
      case 2:  // all members send heartbeats
        for (std::uint8_t other = 1; other <= kMembers; ++other) say(other, 0, wire::Heartbeat{});
        break;
      case 3:
        master_.on_garbage(id, {Code::refused, "garbage"}, now_);
        break;
      default:
        frame(id, what % 16 == 4, script);
    }
    settle();
  }

 private:
  static master::Options options() {
    master::Options options;
    options.limits.max_open_calls = 64;  // within a script's reach
    options.limits.many_open_calls = 16;
    options.limits.max_behind = 256;
    options.limits.max_waits = 16;
    options.limits.strays = options.limits.aborts = options.limits.turns = {16, 1};
    options.limits.restarts = options.limits.breaks = {4, 0.1};
    options.straggler_timeout = std::chrono::seconds(20);
    return options;
  }

  void connect(master::ConnectionId id) { master_.on_connect(id, "192.0.2.7", now_); }

  void say(master::ConnectionId id, std::uint64_t ordinal, const wire::Message& message) {
    master_.on_frame(id, {{master_.run(), master_.term(), ordinal}, message}, now_);
  }

  // A message whose kind and payload come from the script, in a mostly valid envelope.
  void frame(master::ConnectionId id, bool foreign, Script& script) {
    const std::uint8_t type = script.byte();
    const std::uint8_t behind = script.byte();
    wire::Bytes bytes =
        wire::encode({foreign ? kRun + 1 : master_.run(), master_.term(), 0}, wire::RequestLog{});
    const auto payload = script.piece();
    bytes[5] = static_cast<std::uint8_t>(type % std::variant_size_v<wire::Message>);
    bytes[8] = static_cast<std::uint8_t>(payload.size());
    bytes[9] = static_cast<std::uint8_t>(payload.size() >> 8);
    const master::Group* group = master_.group(0);
    const std::uint64_t last = group == nullptr ? 0 : group->log().last();
    // A recent ordinal, or rarely one that is too high.
    const std::uint64_t ordinal =
        behind == 255 ? last + 1 : last - std::min<std::uint64_t>(last, behind % 8);
    for (std::size_t i = 0; i < 8; ++i)
      bytes[24 + i] = static_cast<std::uint8_t>(ordinal >> (8 * i));
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    wire::FrameReader reader;
    reader.feed(bytes);
    wire::Frame read;
    const Result<bool> got = reader.next(read);
    if (!got) {
      master_.on_garbage(id, got.error(), now_);
    } else if (*got) {
      master_.on_frame(id, read, now_);
    }
  }

  void settle() {
    std::vector<master::ConnectionId> closed;
    for (const master::Action& action : master_.take_actions()) {
      if (const auto* close = std::get_if<master::Close>(&action))
        closed.push_back(close->connection);
      if (const auto* send = std::get_if<master::Send>(&action)) check(send->bytes);
    }
    for (const master::ConnectionId id : closed) {
      master_.on_disconnect(id, now_);
      connect(id);
    }
    (void)master_.tick();
  }

  // Members must be able to read and apply the messages that they are sent.
  static void check(const wire::Bytes& bytes) {
    wire::FrameReader reader;
    reader.feed(bytes);
    wire::Frame frame;
    const Result<bool> got = reader.next(frame);
    must(got && *got, "the master's own messages can be read");
    const auto* log = std::get_if<wire::Log>(&frame.message);
    if (log == nullptr) return;
    for (const wire::LogEntry& entry : log->entries) {
      const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
      if (record != nullptr && record->epoch != 0 && !record->members.empty())
        must(topology::valid(record->plan, record->members.size()), "plans fit their members");
    }
  }

  master::Master master_;
  Instant now_{std::chrono::seconds(1000)};
};

}  // namespace
}  // namespace pccl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pccl::fuzz;
  Script script(data, size);
  const std::uint8_t mode = script.byte();
  if (mode % 4 == 0) {
    read_stream(script.rest());
    return 0;
  }
  World world(mode % 4 != 1);
  for (int steps = 0; !script.empty() && steps < 400; ++steps) world.step(script);
  return 0;
}
