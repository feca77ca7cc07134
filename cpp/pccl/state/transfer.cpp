#include "pccl/state/transfer.h"

#include <algorithm>
#include <new>
#include <utility>

namespace pccl::state {
namespace {

constexpr std::uint32_t kManifestSegment = 0xffffffff;
constexpr std::uint64_t kTokenBase = std::uint64_t{1} << 62;  // distinct from operations' tokens
constexpr std::uint64_t kManifestToken = kTokenBase >> 1;     // for manifests that are sent
// Chunks requested from one holder and not yet received: enough for 1 Gbit/s over 100 ms.
constexpr std::size_t kWindow = 16;
constexpr std::size_t kAskAtOnce = 4;   // chunks in one fetch
constexpr std::size_t kMaxSources = 8;  // of one receiver
constexpr std::size_t kMaxClientQueue = 4 * kWindow;
// For memory of a neighbour to arrive. Then it sends bytes.
constexpr Duration kMemoryPatience = std::chrono::seconds(3);

bool contains(const std::vector<PeerId>& peers, const PeerId& id) {
  return std::ranges::find(peers, id) != peers.end();
}

}  // namespace

std::vector<PeerId> sources_of(const wire::SyncDecision& decision, const PeerId& receiver) {
  std::vector<PeerId> sources = decision.holders;
  if (sources.size() <= kMaxSources) return sources;
  // Keep the first holder, whose loose entries count; distribute the others among the receivers.
  const auto at = static_cast<std::size_t>(std::ranges::find(decision.receivers, receiver) -
                                           decision.receivers.begin());
  std::rotate(sources.begin() + 1,
              sources.begin() + 1 +
                  static_cast<std::ptrdiff_t>(at * (kMaxSources - 1) % (sources.size() - 1)),
              sources.end());
  sources.resize(kMaxSources);
  return sources;
}

// -- beginning and ending

void Transfer::begin(const SyncId& id, const PeerId& self, std::shared_ptr<LocalState> mine,
                     const wire::SyncDecision& decision, const TransferOptions& options) {
  active_ = true;
  over_ = false;
  options_ = options;
  id_ = newest_ = id;
  ++token_;
  mine_ = std::move(mine);
  my_index_.emplace(mine_->manifest.entries);
  decision_ = decision;
  tx_bytes_ = earlier_ = 0;
  last_failure_.clear();
  partners_.clear();
  if (contains(decision_.receivers, self)) {
    phase_ = Phase::manifest;
    newcomer_ = contains(decision_.newcomers, self);
    order_ = sources_of(decision_, self);
    partners_ = order_;
    for (const PeerId& source : order_) sources_[source].up = links_.is_up(source);
    ask_manifest();
  } else {
    phase_ = Phase::serving;
    for (const PeerId& receiver : decision_.receivers) {
      if (contains(sources_of(decision_, receiver), self)) partners_.push_back(receiver);
    }
  }
  for (auto& [peer, asked] : early_) {
    auto& [sync, client] = asked;
    if (sync != id || phase_ != Phase::serving || !contains(partners_, peer)) continue;
    std::erase_if(client.chunks, [&](std::uint32_t chunk) { return chunk >= my_index_->count(); });
    clients_[peer] = std::move(client);
    links_.wake(peer);
  }
  std::erase_if(early_, [&](const auto& item) { return item.second.first <= id; });
}

std::unique_ptr<Update> Transfer::end() {
  if (!active_) return nullptr;
  release();
  auto update = std::make_unique<Update>();
  update->decision = std::move(decision_);
  update->tx_bytes = tx_bytes_;
  update->rx_bytes = bytes_done();
  if (phase_ == Phase::complete) plan_->finish(*update);
  drop_plan();
  active_ = false;
  phase_ = Phase::serving;
  mine_.reset();
  my_index_.reset();
  decision_ = {};
  partners_.clear();
  sources_.clear();
  order_.clear();
  manifest_ = Request::none;
  my_manifest_.clear();
  clients_.clear();
  fetches_.clear();
  options_ = {};
  neighbours_.stop_sharing();
  return update;
}

// Connections use neither our memory nor the user's when this returns.
void Transfer::release() {
  releasing_ = true;
  for (const PeerId& peer : partners_) {
    tx_bytes_ -= std::min(tx_bytes_, links_.unsent(peer, kTokenBase + token_));
    links_.release(peer, kTokenBase + token_);
    links_.release(peer, kManifestToken + token_);
  }
  releasing_ = false;
}

void Transfer::go_on() {
  if (!plan_ || !plan_->held()) return;
  plan_->hold(false);
  ask();
  check_over();
}

void Transfer::stop() {
  over_ = true;
  release();
  sources_.clear();
  order_.clear();
}

void Transfer::forget_before(std::uint64_t admission) {
  std::erase_if(early_, [&](const auto& item) { return item.second.first.admission < admission; });
}

// -- sources that come and go

void Transfer::set_members(const std::vector<wire::Member>& members) {
  const auto present = [&](const PeerId& id) {
    return std::any_of(members.begin(), members.end(),
                       [&](const wire::Member& member) { return member.id == id; });
  };
  std::erase_if(clients_, [&](const auto& item) { return !present(item.first); });
  std::erase_if(early_, [&](const auto& item) { return !present(item.first); });
  // A source that has gone is named as it was.
  if (!active_) return void(members_ = members);
  std::erase_if(partners_, [&](const PeerId& id) { return !present(id); });
  for (const PeerId& source : std::vector<PeerId>(order_)) {
    if (!present(source)) drop_source(source, "it is out of the run");
  }
  members_ = members;
}

void Transfer::link_up(const PeerId& peer) {
  const auto it = sources_.find(peer);
  if (it == sources_.end()) return;
  it->second.up = true;
  if (phase_ == Phase::manifest) {
    ask_manifest();
  } else {
    ask();
  }
}

void Transfer::link_down(const PeerId& peer, const link::UnsentBytes& unsent) {
  clients_.erase(peer);  // it asks again on the new link
  early_.erase(peer);
  fetches_.erase(peer);
  const auto mine = unsent.find(kTokenBase + token_);
  if (active_ && mine != unsent.end()) tx_bytes_ -= std::min(tx_bytes_, mine->second);
  const auto it = sources_.find(peer);
  if (it == sources_.end()) return;
  it->second.up = false;
  retry(std::exchange(it->second.asked, {}));
  if (!order_.empty() && peer == order_.front()) manifest_ = Request::none;
  ask();  // the other sources
}

// Whether the source is sending, or was not asked for anything.
bool Transfer::busy(const PeerId& peer, const Source& source) const {
  if (!source.up) return true;
  if (phase_ == Phase::manifest) return manifest_ != Request::asked || peer != order_.front();
  return source.asked.empty() || std::ranges::any_of(source.asked, [&](const Asked& asked) {
           return plan_->chunk(asked.number).placed;
         });
}

void Transfer::on_time(Instant now, Duration limit) {
  // This process was frozen: bytes that its sources sent meanwhile are still unread.
  const bool frozen = now - std::exchange(ticked_, now) > limit / 2;
  if (!receiving()) return;
  std::vector<PeerId> silent;
  for (auto& [peer, source] : sources_) {
    if (!source.reads()) {
      source.unread_since.reset();
    } else if (frozen || !source.unread_since) {
      source.unread_since = now;
    } else if (now - *source.unread_since >= kMemoryPatience) {
      ask_for_bytes(peer, source);
    }
    if (busy(peer, source)) {
      source.idle_since.reset();
    } else if (frozen || !source.idle_since) {
      source.idle_since = now;
    } else if (now - *source.idle_since >= limit) {
      silent.push_back(peer);
    }
  }
  for (const PeerId& peer : silent) drop_source(peer, "does not send the chunks it was asked for");
}

// Stops using a source. Its chunks are requested from the others.
void Transfer::drop_source(const PeerId& peer, const std::string& why) {
  const auto it = sources_.find(peer);
  if (it == sources_.end()) return;
  const bool first = !order_.empty() && order_.front() == peer;
  // Frames from it that are still in flight must not overwrite the bytes of another source.
  releasing_ = true;
  links_.release(peer, kTokenBase + token_);
  releasing_ = false;
  last_failure_ = "peer " + wire::shown_name(members_, peer) + ": " + why;
  retry(it->second.asked);
  sources_.erase(it);
  std::erase(order_, peer);
  if (over_) return;
  if (order_.empty()) {
    if (phase_ == Phase::complete) return;
    return finish(Code::peer_lost, "no holder of the state is left (" + last_failure_ + ")");
  }
  if (first) manifest_ = Request::none;
  if (first && phase_ == Phase::chunks && plan_->has_loose()) {
    // Another holder's loose entries may differ: start again with its manifest.
    release();
    phase_ = Phase::manifest;
    for (auto& [id, source] : sources_) source.asked.clear();
    drop_plan();
  }
  if (phase_ == Phase::manifest) {
    ask_manifest();
  } else {
    ask();
  }
}

void Transfer::drop_plan() {
  if (!plan_) return;
  if (mine_->mixed) fill_contents(*mine_, *my_index_);
  earlier_ += plan_->bytes_done();
  plan_.reset();
}

// -- requests

link::FrameHeader Transfer::header(link::FrameType type) const {
  return {.type = type, .key = {.admission = id_.admission, .sequence = id_.sequence}};
}

void Transfer::ask_manifest() {
  if (manifest_ != Request::none || order_.empty() || !sources_.at(order_.front()).up) return;
  manifest_ = Request::asked;
  Fetch fetch;
  fetch.manifest = true;
  send_fetch(order_.front(), fetch);
}

void Transfer::send_fetch(const PeerId& to, const Fetch& fetch) {
  // A fetch always has a checksum: it is small, and a damaged one would never be answered.
  fetches_[to].push_back(
      link::make_checked_frame(header(link::FrameType::fetch), wire::encoded(fetch)));
  links_.wake(to);
}

// The memory of chunks that a source has located cannot be read.
void Transfer::ask_for_bytes(const PeerId& peer, Source& source) {
  Fetch fetch;
  fetch.unreadable = true;
  for (Asked& asked : source.asked)
    if (std::exchange(asked.at, std::nullopt)) fetch.chunks.push_back(asked.number);
  source.unread_since.reset();
  source.idle_since.reset();
  send_fetch(peer, fetch);
}

// Keeps every source's window full.
void Transfer::ask() {
  if (phase_ != Phase::chunks || plan_->held()) return;
  bool some = true;
  while (some && !plan_->all_asked()) {
    some = false;
    for (auto& [peer, source] : sources_) {
      if (!source.up || source.asked.size() + kAskAtOnce > kWindow) continue;
      Fetch fetch;
      while (fetch.chunks.size() < kAskAtOnce) {
        const auto chunk = plan_->next(peer == order_.front());
        if (!chunk) break;
        fetch.chunks.push_back(*chunk);
      }
      if (fetch.chunks.empty()) continue;
      some = true;
      for (const std::uint32_t chunk : fetch.chunks) source.asked.push_back({chunk, {}});
      send_fetch(peer, fetch);
    }
  }
}

void Transfer::retry(const std::vector<Asked>& chunks) {
  std::vector<std::uint32_t> numbers;
  for (const Asked& asked : chunks) numbers.push_back(asked.number);
  if (!numbers.empty()) plan_->retry(numbers);
}

void Transfer::check_over() {
  if (over_ || phase_ != Phase::chunks || !plan_->complete()) return;
  phase_ = Phase::complete;
  finish(Code::ok, {});
}

void Transfer::finish(Code code, std::string reason) {
  over_ = true;
  events_.over = Error{code, std::move(reason)};
}

// -- events of links

link::Placement Transfer::place(const PeerId& from, const link::FrameHeader& header) {
  link::Placement placement;
  placement.kind = link::Placement::Kind::drain;
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return placement;
  const auto it = sources_.find(from);
  if (it == sources_.end()) return placement;
  placement.token = kTokenBase + token_;
  if (header.segment == kManifestSegment) {
    if (phase_ != Phase::manifest || from != order_.front() || manifest_ != Request::asked) {
      return placement;
    }
    manifest_ = Request::placed;
    placement.kind = link::Placement::Kind::store;
    placement.buffer = pool_->take(header.payload_bytes);
    placement.where = {link::vec(placement.buffer.data(), header.payload_bytes)};
    return placement;
  }
  Source& source = it->second;
  if (source.find(header.segment) == nullptr) return placement;
  const FetchPlan::Chunk& chunk = plan_->chunk(header.segment);
  if (chunk.placed) return placement;  // a second copy must not overwrite the first one
  if (chunk.bytes != header.payload_bytes) {
    placement.kind = link::Placement::Kind::refuse;
    placement.reason = "a chunk of the wrong length";
    return placement;
  }
  plan_->place(header.segment);
  source.idle_since.reset();
  placement.kind = link::Placement::Kind::store;
  placement.where = {link::vec(chunk.to, chunk.bytes)};
  return placement;
}

Status Transfer::arrived(const PeerId& from, const link::FrameHeader& header, Buffer buffer) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return {};
  const auto it = sources_.find(from);
  if (it == sources_.end()) return {};
  if (header.segment == kManifestSegment) {
    if (manifest_ == Request::placed) manifest_ = Request::asked;
    if (phase_ == Phase::manifest && buffer)
      take_manifest(from, {buffer.data(), header.payload_bytes});
    return {};
  }
  if (it->second.find(header.segment) == nullptr) return {};
  it->second.received(header.segment);
  it->second.idle_since.reset();
  const FetchPlan::Chunk& chunk = plan_->chunk(header.segment);
  if (!plan_->accept(header.segment, digest({chunk.to, chunk.bytes}))) {
    // The source's memory changed during the sync, or the source is hostile. Other sources have the
    // right bytes.
    drop_source(from, "sent a chunk that is not the one it has announced");
    return {};
  }
  ask();
  check_over();
  return {};
}

void Transfer::take_manifest(const PeerId& from, std::span<const std::uint8_t> bytes) {
  wire::Reader reader(bytes);
  Manifest manifest;
  reader(manifest);
  if (!reader.complete() || !valid(manifest, decision_.content, mine_->entries))
    return drop_source(from, "sent a list of chunks that is not the elected state's");
  try {
    plan_.emplace(std::move(manifest), *mine_, *my_index_, newcomer_, *pool_);
  } catch (const std::bad_alloc&) {
    return finish(Code::internal_error, "out of memory for the state to be received");
  }
  phase_ = Phase::chunks;
  plan_->hold(options_.waits && mine_->overwrite && !plan_->replacements().empty());
  events_.planned = true;
  ask();
  check_over();
}

// The sender has abandoned a frame: it has left the sync, and the master will report that.
void Transfer::voided(const PeerId& from, const link::FrameHeader& header) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return;
  interrupted(header);
  if (!releasing_ && sources_.contains(from)) drop_source(from, "stopped sending");
}

// The frame will be sent again on another stripe.
void Transfer::interrupted(const link::FrameHeader& header) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return;
  if (header.segment == kManifestSegment) {
    if (manifest_ == Request::placed) manifest_ = Request::asked;
  } else if (plan_) {
    plan_->unplace(header.segment);
  }
}

Status Transfer::control(const PeerId& from, const link::FrameHeader& header,
                         std::span<const std::uint8_t> payload) {
  if (header.checksum == 0)  // other values have been verified
    return Status(Code::refused, "a frame about state without a checksum");
  const SyncId id{header.key.admission, header.key.sequence};
  return header.type == link::FrameType::located ? on_located(from, id, payload)
                                                 : on_fetch(from, id, payload);
}

Status Transfer::on_fetch(const PeerId& from, const SyncId& id,
                          std::span<const std::uint8_t> payload) {
  Fetch fetch;
  wire::Reader reader(payload);
  reader(fetch);
  if (!reader.complete() || fetch.chunks.size() > kWindow)
    return Status(Code::refused, "a malformed request for state");
  const bool now = active_ && id == id_;
  if (!now && id <= newest_) return {};  // of a sync that is over
  // Only receivers that have us as a source may read our memory.
  if (now && (phase_ != Phase::serving || !contains(partners_, from))) return {};
  if (!now) {
    auto& [sync, asked] = early_[from];
    if (id < sync) return {};
    if (id > sync) asked = {};
    sync = id;
  }
  Client& client = now ? clients_[from] : early_.at(from).second;
  if (client.chunks.size() + fetch.chunks.size() > kMaxClientQueue)
    return Status(Code::refused, "too many chunks requested");
  client.manifest = client.manifest || fetch.manifest;
  client.cannot_read = client.cannot_read || fetch.unreadable;
  for (const std::uint32_t chunk : fetch.chunks) {
    if (now && chunk >= my_index_->count())
      return Status(Code::refused, "a request for a chunk that does not exist");
    // Counted when it was told where this chunk is.
    if (now && fetch.unreadable) tx_bytes_ -= std::min(tx_bytes_, my_index_->at(chunk).bytes);
    client.chunks.push_back(chunk);
  }
  if (now) links_.wake(from);
  return {};
}

Status Transfer::on_located(const PeerId& from, const SyncId& id,
                            std::span<const std::uint8_t> payload) {
  Located located;
  wire::Reader reader(payload);
  reader(located);
  if (!reader.complete() || located.chunks.size() > kWindow)
    return Status(Code::refused, "malformed places of state");
  const auto it = sources_.find(from);
  if (!active_ || id != id_ || it == sources_.end()) return {};
  for (const Located::Chunk& chunk : located.chunks)
    if (Asked* const asked = it->second.find(chunk.number)) asked->at = chunk.at;
  return {};
}

// -- memory of neighbours

Transfer::Asked* Transfer::Source::find(std::uint32_t number) {
  const auto it = std::ranges::find(asked, number, &Asked::number);
  return it == asked.end() ? nullptr : &*it;
}

void Transfer::Source::received(std::uint32_t number) {
  std::erase_if(asked, [&](const Asked& one) { return one.number == number; });
}

bool Transfer::Source::reads() const {
  return std::ranges::any_of(asked, [](const Asked& one) { return one.at.has_value(); });
}

bool Transfer::has_work() const {
  const auto can_read = [&](const auto& item) {
    const auto& [peer, source] = item;
    return std::ranges::any_of(source.asked, [&](const Asked& asked) {
      return asked.at && neighbours_.memory_of(peer, asked.at->memory).has_value();
    });
  };
  return active_ && phase_ == Phase::chunks && std::ranges::any_of(sources_, can_read);
}

void Transfer::read() {
  for (const PeerId& peer : std::vector<PeerId>(order_)) read_from(peer);
}

void Transfer::read_from(const PeerId& peer) {
  const auto it = sources_.find(peer);
  if (phase_ != Phase::chunks || it == sources_.end()) return;
  Source& source = it->second;
  struct Reading {
    std::uint32_t number;
    const std::uint8_t* from;
    wire::Digest found;
  };
  std::vector<Reading> readings;
  std::uint64_t bytes = 0;
  bool unmapped = false;
  std::string flaw;
  for (Asked& asked : source.asked) {
    if (!asked.at) continue;
    const FetchPlan::Chunk& chunk = plan_->chunk(asked.number);
    const auto memory = neighbours_.memory_of(peer, asked.at->memory);
    if (chunk.placed) {
      asked.at.reset();  // its bytes are coming
    } else if (!memory || memory->empty()) {
      unmapped = unmapped || memory.has_value();
    } else if (asked.at->offset > memory->size() ||
               chunk.bytes > memory->size() - asked.at->offset) {
      flaw = "named a place outside of the memory that it shares";
    } else {
      plan_->place(asked.number);
      readings.push_back({asked.number, memory->data() + asked.at->offset, {}});
      bytes += chunk.bytes;
    }
  }
  Serial serial;
  const bool shared = options_.parallel != nullptr && bytes >= kWorthSharing;
  (shared ? *options_.parallel : serial).run(readings.size(), [&](std::size_t i) {
    const FetchPlan::Chunk& chunk = plan_->chunk(readings[i].number);
    readings[i].found = copy_digest(chunk.to, readings[i].from, chunk.bytes);
  });
  for (const Reading& reading : readings) {
    source.received(reading.number);
    if (!plan_->accept(reading.number, reading.found))
      flaw = "has memory with a chunk that is not the one it has announced";
  }
  if (!readings.empty()) {
    source.idle_since.reset();
    source.unread_since.reset();
  }
  if (!flaw.empty()) return drop_source(peer, flaw);
  if (unmapped) ask_for_bytes(peer, source);
  ask();
  check_over();
}

// Tells a receiver on this host where its next chunks are. False: it needs their bytes.
bool Transfer::locate(const PeerId& to, Client& client, link::OutgoingFrame& frame) {
  Located located;
  while (!client.cannot_read && !client.chunks.empty() && located.chunks.size() < kWindow) {
    const std::uint32_t number = client.chunks.front();
    const ChunkRange range = my_index_->at(number);
    const auto place =
        neighbours_.share(to, mine_->entries[range.entry].data + range.offset, range.bytes);
    if (!place) break;
    client.chunks.pop_front();
    located.chunks.push_back({number, *place});
    tx_bytes_ += range.bytes;
  }
  if (located.chunks.empty()) return false;
  frame = link::make_checked_frame(header(link::FrameType::located), wire::encoded(located));
  return true;
}

bool Transfer::next(const PeerId& to, link::OutgoingFrame& frame) {
  if (!active_) return false;
  const auto fetches = fetches_.find(to);
  if (fetches != fetches_.end() && !fetches->second.empty()) {
    frame = std::move(fetches->second.front());
    fetches->second.pop_front();
    return true;
  }
  const auto found = clients_.find(to);
  if (found == clients_.end()) return false;
  Client& client = found->second;
  link::FrameHeader head = header(link::FrameType::state);
  frame.payload.clear();
  frame.token = kTokenBase + token_;
  if (client.manifest) {
    client.manifest = false;
    if (my_manifest_.empty()) my_manifest_ = wire::encoded(mine_->manifest);
    head.segment = kManifestSegment;
    frame.token = kManifestToken + token_;
    head.payload_bytes = static_cast<std::uint32_t>(my_manifest_.size());
    frame.payload.push_back(link::vec(my_manifest_.data(), my_manifest_.size()));
  } else if (locate(to, client, frame)) {
    return true;
  } else if (!client.chunks.empty()) {
    head.segment = client.chunks.front();
    client.chunks.pop_front();
    const ChunkRange range = my_index_->at(head.segment);
    head.payload_bytes = static_cast<std::uint32_t>(range.bytes);
    frame.payload.push_back(
        link::vec(mine_->entries[range.entry].data + range.offset, range.bytes));
    tx_bytes_ += range.bytes;
  } else {
    return false;
  }
  if (links_.is_checked(to)) head.checksum = link::checksum(head, frame.payload);
  frame.header = link::encode(head);
  frame.payload_bytes = head.payload_bytes;
  frame.trailer = true;
  return true;
}

}  // namespace pccl::state
