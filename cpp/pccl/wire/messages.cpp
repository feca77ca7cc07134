#include "pccl/wire/messages.h"

#include <algorithm>
#include <iterator>

namespace pccl::wire {
namespace {

struct Header {
  std::uint32_t magic = kMagic;
  std::uint8_t version = kProtocolVersion;
  std::uint8_t type = 0;
  std::uint16_t zero = 0;
  std::uint32_t length = 0;
  std::uint32_t term = 0;
  std::uint64_t run = 0;
  std::uint64_t ordinal = 0;
  static void fields(auto& self, auto& visit) {
    visit(self.magic, self.version, self.type, self.zero, self.length, self.term, self.run,
          self.ordinal);
  }
};

// Reads alternative number `index` of Message.
template <std::size_t... Is>
void read_alternative(Message& message, std::size_t index, Reader& reader,
                      std::index_sequence<Is...>) {
  ((index == Is ? reader(message.template emplace<Is>()) : void()), ...);
}

bool passes_point(const Outcome& outcome, const EpochRecord& record) {
  return record.ranks_per_replica > 0 && outcome.code == Code::ok &&
         (outcome.key.kind == RoundKind::admit || outcome.key.kind == RoundKind::sync_admit);
}

}  // namespace

const char* name(RoundKind kind) {
  constexpr const char* kNames[] = {"admit", "are_peers_pending", "barrier", "sync", "sync", "sync",
                                    "sync",  "optimize_topology"};
  static_assert(std::size(kNames) == enum_count(RoundKind{}));
  return kNames[static_cast<std::size_t>(kind)];
}

std::string describe(const OpKey& key) {
  const std::string text = "collective #" + std::to_string(key.sequence);
  return key.tagged ? text + " of tag " + std::to_string(key.tag) : text;
}

std::string describe(const RoundKey& key) {
  return std::string(name(key.kind)) + " #" + std::to_string(key.sequence);
}

std::string describe(const CallKey& key) {
  return std::visit([](const auto& k) { return describe(k); }, key);
}

std::string shown_name(const std::vector<Member>& members, const PeerId& id) {
  const auto found = std::ranges::find(members, id, &Member::id);
  if (found == members.end()) return id.brief();
  const bool alone = std::ranges::count(members, found->name, &Member::name) == 1;
  return shown_name(found->name, id, alone);
}

std::string shown_name(const std::string& name, const PeerId& id, bool alone) {
  if (name.empty()) return id.brief();
  return alone ? name : name + "/" + id.brief();
}

Status check_relays(const EpochRecord& record) {
  const std::vector<RankPair>& pairs = record.relayed;
  if (pairs.size() > kMaxRelayed) {
    return Status(Code::refused, std::to_string(pairs.size()) +
                                     " relayed pairs are over the limit of " +
                                     std::to_string(kMaxRelayed));
  }
  const auto is_foreign = [&](const RankPair& pair) {
    return pair.first >= pair.second || pair.second >= record.members.size();
  };
  if (std::any_of(pairs.begin(), pairs.end(), is_foreign))
    return Status(Code::refused, "a relayed pair is not a pair of its members");
  const auto not_after = [](const RankPair& a, const RankPair& b) {
    return std::pair(a.first, a.second) >= std::pair(b.first, b.second);
  };
  if (std::adjacent_find(pairs.begin(), pairs.end(), not_after) != pairs.end())
    return Status(Code::refused, "a relayed pair is listed twice or out of order");
  return {};
}

std::uint64_t next_point(const EpochRecord& record, RoundKind kind) {
  return record.points + (kind == RoundKind::sync_admit && record.point_open ? 0 : 1);
}

bool changes_record(const Outcome& outcome, const EpochRecord& record) {
  return outcome.sync.step == SyncStep::done || passes_point(outcome, record);
}

void apply(const Outcome& outcome, EpochRecord& record) {
  if (passes_point(outcome, record)) {
    record.points = next_point(record, outcome.key.kind);
    record.point_open = outcome.key.kind == RoundKind::sync_admit;
  }
  if (outcome.sync.step != SyncStep::done) return;
  record.point_open = false;
  record.state = {true, outcome.sync.revision, outcome.sync.content, {}};
  for (const Member& member : record.members) record.state.holders.push_back(member.id);
}

Bytes encode(const Envelope& envelope, const Message& message) {
  Bytes bytes;
  bytes.reserve(256);
  Writer writer(bytes);
  Header header;
  header.type = static_cast<std::uint8_t>(message.index());
  header.term = envelope.term;
  header.run = envelope.run;
  header.ordinal = envelope.ordinal;
  writer(header);
  std::visit([&](const auto& body) { writer(body); }, message);
  const auto length = static_cast<std::uint32_t>(bytes.size() - kHeaderBytes);
  for (std::size_t i = 0; i < 4; ++i) bytes[8 + i] = static_cast<std::uint8_t>(length >> (8 * i));
  return bytes;
}

Result<bool> FrameReader::next(Frame& frame) {
  const std::span<const std::uint8_t> rest = std::span(buffer_).subspan(at_);
  // Judge the first bytes as soon as they arrive: a foreign client may never send more.
  for (std::size_t i = 0; i < std::min<std::size_t>(rest.size(), 4); ++i) {
    if (rest[i] != static_cast<std::uint8_t>(kMagic >> (8 * i)))
      return {Code::refused, "these bytes are not pccl's control protocol"};
  }
  if (rest.size() > 4 && rest[4] != kProtocolVersion) {
    return {Code::refused, "protocol version " + std::to_string(rest[4]) +
                               " does not match version " + std::to_string(kProtocolVersion)};
  }
  if (rest.size() < kHeaderBytes) return false;
  Header header;
  Reader header_reader(rest.first(kHeaderBytes));
  header_reader(header);
  if (header.zero != 0 || header.type >= std::variant_size_v<Message>) {
    return {Code::refused, "unknown message type " + std::to_string(header.type)};
  }
  if (header.length > max_payload_) {
    return {Code::refused, "a message of " + std::to_string(header.length) +
                               " bytes is over the limit of " + std::to_string(max_payload_)};
  }
  if (rest.size() < kHeaderBytes + header.length) return false;
  Reader reader(rest.subspan(kHeaderBytes, header.length));
  read_alternative(frame.message, header.type, reader,
                   std::make_index_sequence<std::variant_size_v<Message>>{});
  if (!reader.complete()) {
    return {Code::refused, "malformed message of type " + std::to_string(header.type)};
  }
  frame.envelope = {header.run, header.term, header.ordinal};
  at_ += kHeaderBytes + header.length;
  if (at_ == buffer_.size()) {
    buffer_.clear();
    if (buffer_.capacity() > kKeptBuffer) Bytes().swap(buffer_);
    at_ = 0;
  } else if (at_ > buffer_.size() / 2) {
    buffer_.erase(buffer_.begin(), buffer_.begin() + static_cast<std::ptrdiff_t>(at_));
    at_ = 0;
  }
  return true;
}

}  // namespace pccl::wire
