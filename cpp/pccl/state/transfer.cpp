#include "pccl/state/transfer.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace pccl::state {
namespace {

constexpr std::uint32_t kManifestSegment = 0xffffffff;
constexpr std::uint64_t kTokenBase = std::uint64_t{1} << 62;  // apart from those of operations
constexpr std::uint64_t kManifestToken = kTokenBase >> 1;     // of manifests that are sent, beside
// Asked of one holder and not yet here: enough for 1 Gbit/s over 100 ms.
constexpr std::size_t kWindow = 16;
constexpr std::size_t kAskAtOnce = 4;   // chunks in one fetch
constexpr std::size_t kMaxSources = 8;  // of one receiver
constexpr std::size_t kMaxClientQueue = 4 * kWindow;

iovec vec(const void* data, std::size_t size) { return {const_cast<void*>(data), size}; }

bool contains(const std::vector<PeerId>& peers, const PeerId& id) {
  return std::find(peers.begin(), peers.end(), id) != peers.end();
}

}  // namespace

std::vector<PeerId> sources_of(const wire::SyncDecision& decision, const PeerId& receiver) {
  std::vector<PeerId> sources = decision.holders;
  if (sources.size() <= kMaxSources) return sources;
  // The first holder's loose entries count; the rest are shared out among the receivers.
  const auto at = static_cast<std::size_t>(
      std::find(decision.receivers.begin(), decision.receivers.end(), receiver) -
      decision.receivers.begin());
  std::rotate(sources.begin() + 1,
              sources.begin() + 1 +
                  static_cast<std::ptrdiff_t>(at * (kMaxSources - 1) % (sources.size() - 1)),
              sources.end());
  sources.resize(kMaxSources);
  return sources;
}

// ---- beginning and ending

void Transfer::begin(const SyncId& id, const PeerId& self, std::shared_ptr<const LocalState> mine,
                     const wire::SyncDecision& decision) {
  active_ = true;
  over_ = false;
  id_ = newest_ = id;
  self_ = self;
  ++token_;
  mine_ = std::move(mine);
  my_index_.emplace(mine_->manifest.entries);
  decision_ = decision;
  tx_bytes_ = rx_bytes_ = bytes_done_ = bytes_wanted_ = 0;
  left_ = 0;
  last_failure_.clear();
  partners_.clear();
  if (contains(decision_.receivers, self_)) {
    phase_ = Phase::manifest;
    newcomer_ = contains(decision_.newcomers, self_);
    order_ = sources_of(decision_, self_);
    partners_ = order_;
    for (const PeerId& source : order_) sources_[source].up = links_.is_up(source);
    ask_manifest();
  } else {
    phase_ = Phase::serving;
    for (const PeerId& receiver : decision_.receivers) {
      if (contains(sources_of(decision_, receiver), self_)) partners_.push_back(receiver);
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
  update->rx_bytes = rx_bytes_;
  if (phase_ == Phase::complete) {
    // First what is taken from our own entries: others of them may share their memory.
    update->copies = std::move(kept_);
    for (Incoming& incoming : incoming_) {
      const std::uint64_t first = index_->first_of(incoming.entry);
      const std::uint64_t end = index_->first_of(incoming.entry + 1);
      const bool in_place = incoming.mine != nullptr && incoming.mine->writable != nullptr &&
                            incoming.mine->what.bytes == elected_.entries[incoming.entry].bytes;
      if (!in_place) {
        update->replacements.push_back(
            {elected_.entries[incoming.entry], std::move(incoming.memory)});
        continue;
      }
      for (std::uint64_t chunk = first; chunk < end; ++chunk) {
        const auto wanted = wanted_.find(static_cast<std::uint32_t>(chunk));
        if (wanted == wanted_.end()) continue;
        update->copies.push_back({incoming.mine->writable + (chunk - first) * kChunkBytes,
                                  wanted->second.to, wanted->second.bytes});
      }
      update->staging.push_back(std::move(incoming.memory));
      update->written.push_back(incoming.mine->what.name);
    }
  }
  active_ = false;
  phase_ = Phase::serving;
  mine_.reset();
  my_index_.reset();
  decision_ = {};
  partners_.clear();
  sources_.clear();
  order_.clear();
  manifest_asked_ = manifest_placed_ = false;
  manifest_bytes_.clear();
  elected_ = {};
  index_.reset();
  incoming_.clear();
  kept_.clear();
  wanted_.clear();
  todo_.clear();
  loose_todo_.clear();
  my_manifest_.clear();
  clients_.clear();
  fetches_.clear();
  return update;
}

// No connection uses our memory or the user's any more.
void Transfer::release() {
  releasing_ = true;
  for (const PeerId& peer : partners_) {
    tx_bytes_ -= std::min(tx_bytes_, links_.unsent(peer, kTokenBase + token_));
    links_.release(peer, kTokenBase + token_);
    links_.release(peer, kManifestToken + token_);
  }
  releasing_ = false;
}

void Transfer::stop() {
  over_ = true;
  release();
  sources_.clear();
  order_.clear();
}

std::vector<wire::StateEntry> Transfer::replacements() const {
  std::vector<wire::StateEntry> entries;
  for (const Incoming& incoming : incoming_) {
    const wire::StateEntry& entry = elected_.entries[incoming.entry];
    const LocalEntry* mine = incoming.mine;
    if (mine == nullptr || mine->writable == nullptr || mine->what.bytes != entry.bytes)
      entries.push_back(entry);
  }
  return entries;
}

void Transfer::forget_before(std::uint64_t admission) {
  std::erase_if(early_, [&](const auto& item) { return item.second.first.admission < admission; });
}

// ---- sources that come and go

void Transfer::set_members(const std::vector<wire::Member>& members) {
  const auto present = [&](const PeerId& id) {
    return std::any_of(members.begin(), members.end(),
                       [&](const wire::Member& member) { return member.id == id; });
  };
  std::erase_if(clients_, [&](const auto& item) { return !present(item.first); });
  std::erase_if(early_, [&](const auto& item) { return !present(item.first); });
  if (!active_) return;
  std::erase_if(partners_, [&](const PeerId& id) { return !present(id); });
  for (const PeerId& source : std::vector<PeerId>(order_)) {
    if (!present(source)) drop_source(source, "it is out of the run");
  }
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
  for (const std::uint32_t chunk : std::exchange(it->second.asked, {})) {
    Wanted& wanted = wanted_.at(chunk);
    wanted.placed = false;
    (wanted.loose ? loose_todo_ : todo_).push_front(chunk);
  }
  if (!order_.empty() && peer == order_.front()) manifest_asked_ = manifest_placed_ = false;
  ask();  // the others
}

// It has sent something, or was not asked for anything.
bool Transfer::busy(const PeerId& peer, const Source& source) const {
  if (!source.up) return true;
  if (phase_ == Phase::manifest)
    return !manifest_asked_ || manifest_placed_ || peer != order_.front();
  return source.asked.empty() ||
         std::any_of(source.asked.begin(), source.asked.end(),
                     [&](std::uint32_t chunk) { return wanted_.at(chunk).placed; });
}

void Transfer::on_time(Instant now, Duration limit) {
  // We were frozen, not they: what they sent meanwhile is still to be read.
  const bool frozen = now - std::exchange(ticked_, now) > limit / 2;
  if (!receiving()) return;
  std::vector<PeerId> mute;
  for (auto& [peer, source] : sources_) {
    if (busy(peer, source)) {
      source.idle_since.reset();
    } else if (frozen || !source.idle_since) {
      source.idle_since = now;
    } else if (now - *source.idle_since >= limit) {
      mute.push_back(peer);
    }
  }
  for (const PeerId& peer : mute) drop_source(peer, "does not send what it was asked for");
}

// The source will not be asked any more.
void Transfer::drop_source(const PeerId& peer, const std::string& why) {
  const auto it = sources_.find(peer);
  if (it == sources_.end()) return;
  const bool first = !order_.empty() && order_.front() == peer;
  // What of it is still under way must not land where another source's bytes are by then.
  releasing_ = true;
  links_.release(peer, kTokenBase + token_);
  releasing_ = false;
  last_failure_ = "peer " + peer.brief() + ": " + why;
  for (const std::uint32_t chunk : it->second.asked) {
    Wanted& wanted = wanted_.at(chunk);
    wanted.placed = false;
    (wanted.loose ? loose_todo_ : todo_).push_front(chunk);
  }
  sources_.erase(it);
  std::erase(order_, peer);
  if (over_) return;
  if (order_.empty()) {
    if (phase_ == Phase::complete) return;
    over_ = true;
    events_.over =
        Error{Code::peer_lost, "nobody is left who has the state (" + last_failure_ + ")", {}, {}};
    return;
  }
  if (first && newcomer_ && phase_ == Phase::chunks) {
    // Another holder's loose entries may be others: all of them anew, from its manifest on.
    release();
    phase_ = Phase::manifest;
    manifest_asked_ = manifest_placed_ = false;
    incoming_.clear();
    kept_.clear();
    for (auto& [id, source] : sources_) source.asked.clear();
    wanted_.clear();
    todo_.clear();
    loose_todo_.clear();
    rx_bytes_ = bytes_done_ = 0;
  } else if (first) {
    manifest_asked_ = manifest_placed_ = false;
  }
  if (phase_ == Phase::manifest) {
    ask_manifest();
  } else {
    ask();
  }
}

// ---- asking

link::FrameHeader Transfer::header(link::FrameType type) const {
  link::FrameHeader header;
  header.type = type;
  header.key.admission = id_.admission;
  header.key.sequence = id_.sequence;
  return header;
}

void Transfer::ask_manifest() {
  if (manifest_asked_ || order_.empty() || !sources_.at(order_.front()).up) return;
  manifest_asked_ = true;
  send_fetch(order_.front(), {true, {}});
}

void Transfer::send_fetch(const PeerId& to, const Fetch& fetch) {
  wire::Bytes payload;
  wire::Writer writer(payload);
  writer(fetch);
  link::FrameHeader head = header(link::FrameType::fetch);
  head.payload_bytes = static_cast<std::uint32_t>(payload.size());
  // Always checked: it is small, and a spoilt one would be waited for in vain.
  const iovec whole = vec(payload.data(), payload.size());
  head.checksum = link::checksum(head, {&whole, 1});
  fetches_[to].push_back(link::make_frame(head, std::move(payload)));
  links_.wake(to);
}

// Keeps every source's window full.
void Transfer::ask() {
  if (phase_ != Phase::chunks) return;
  bool some = true;
  while (some && !(todo_.empty() && loose_todo_.empty())) {
    some = false;
    for (auto& [peer, source] : sources_) {
      if (!source.up || source.asked.size() + kAskAtOnce > kWindow) continue;
      Fetch fetch;
      const bool first = peer == order_.front();
      while (fetch.chunks.size() < kAskAtOnce) {
        std::deque<std::uint32_t>& list = first && !loose_todo_.empty() ? loose_todo_ : todo_;
        if (list.empty()) break;
        fetch.chunks.push_back(list.front());
        list.pop_front();
      }
      if (fetch.chunks.empty()) continue;
      some = true;
      source.asked.insert(source.asked.end(), fetch.chunks.begin(), fetch.chunks.end());
      send_fetch(peer, fetch);
    }
  }
}

// The manifest is here: what differs, and where it goes.
void Transfer::plan() {
  index_.emplace(elected_.entries);
  auto mine = mine_->entries.begin();
  for (std::uint32_t e = 0; e < elected_.entries.size(); ++e) {
    const wire::StateEntry& entry = elected_.entries[e];
    while (mine != mine_->entries.end() && mine->what.name < entry.name) ++mine;
    const LocalEntry* own =
        mine != mine_->entries.end() && mine->what.name == entry.name ? &*mine : nullptr;
    // Whoever is no newcomer keeps what may differ.
    if (own != nullptr && (own->what.content == entry.content || (entry.loose && !newcomer_)))
      continue;
    const std::uint64_t first = index_->first_of(e);
    const std::uint64_t end = index_->first_of(e + 1);
    const std::uint64_t my_first =
        own == nullptr ? 0
                       : my_index_->first_of(static_cast<std::size_t>(own - &mine_->entries[0]));
    const bool same_size = own != nullptr && own->what.bytes == entry.bytes;
    const auto same = [&](std::uint64_t chunk) {
      return same_size &&
             mine_->manifest.chunks[my_first + chunk - first] == elected_.chunks[chunk];
    };
    const bool in_place = same_size && own->writable != nullptr;
    Incoming incoming;
    incoming.entry = e;
    incoming.mine = own;
    std::uint64_t room = entry.bytes;
    if (in_place) {
      room = 0;
      for (std::uint64_t chunk = first; chunk < end; ++chunk) {
        if (!same(chunk)) room += index_->at(chunk).bytes;
      }
    }
    if (room > 0) incoming.memory = pool_->take(room);
    std::uint64_t at = 0;
    for (std::uint64_t chunk = first; chunk < end; ++chunk) {
      const ChunkPlace place = index_->at(chunk);
      std::uint8_t* to = incoming.memory.data() + (in_place ? at : place.offset);
      if (same(chunk)) {
        // Copied after the sync, by the caller's thread.
        if (!in_place) kept_.push_back({to, own->data + place.offset, place.bytes});
        continue;
      }
      at += place.bytes;
      const auto number = static_cast<std::uint32_t>(chunk);
      wanted_[number] = {to, place.bytes, entry.loose, false};
      (entry.loose ? loose_todo_ : todo_).push_back(number);
      bytes_wanted_ += place.bytes;
    }
    incoming_.push_back(std::move(incoming));
  }
  left_ = wanted_.size();
  phase_ = Phase::chunks;
  events_.planned = true;
  ask();
  check_over();
}

void Transfer::check_over() {
  if (over_ || phase_ != Phase::chunks || left_ > 0) return;
  phase_ = Phase::complete;
  over_ = true;
  events_.over = Error{Code::ok, {}, {}, {}};
}

// ---- the link's side

link::Placement Transfer::place(const PeerId& from, const link::FrameHeader& header) {
  link::Placement placement;
  placement.kind = link::Placement::Kind::drain;
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return placement;
  const auto it = sources_.find(from);
  if (it == sources_.end()) return placement;
  placement.token = kTokenBase + token_;
  if (header.segment == kManifestSegment) {
    if (phase_ != Phase::manifest || from != order_.front() || !manifest_asked_ ||
        manifest_placed_) {
      return placement;
    }
    manifest_placed_ = true;
    placement.kind = link::Placement::Kind::store;
    placement.buffer = pool_->take(header.payload_bytes);
    placement.where = {vec(placement.buffer.data(), header.payload_bytes)};
    return placement;
  }
  Source& source = it->second;
  const auto& asked = source.asked;
  if (std::find(asked.begin(), asked.end(), header.segment) == asked.end()) return placement;
  Wanted& wanted = wanted_.at(header.segment);
  if (wanted.placed) return placement;  // a second copy must not land where the first is checked
  if (wanted.bytes != header.payload_bytes) {
    placement.kind = link::Placement::Kind::refuse;
    placement.reason = "a chunk of the wrong length";
    return placement;
  }
  wanted.placed = true;
  source.idle_since.reset();
  placement.kind = link::Placement::Kind::store;
  placement.where = {vec(wanted.to, wanted.bytes)};
  return placement;
}

Status Transfer::arrived(const PeerId& from, const link::FrameHeader& header, Buffer buffer) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return {};
  const auto it = sources_.find(from);
  if (it == sources_.end()) return {};
  if (header.segment == kManifestSegment) {
    manifest_placed_ = false;
    if (phase_ == Phase::manifest && buffer)
      take_manifest(from, {buffer.data(), header.payload_bytes});
    return {};
  }
  if (std::erase(it->second.asked, header.segment) == 0) return {};
  it->second.idle_since.reset();
  Wanted& wanted = wanted_.at(header.segment);
  wanted.placed = false;
  if (digest({wanted.to, wanted.bytes}) != elected_.chunks[header.segment]) {
    // Its memory changed under the sync, or it lies. The others have the right bytes.
    (wanted.loose ? loose_todo_ : todo_).push_front(header.segment);
    drop_source(from, "sent a chunk that is not the one it has announced");
    return {};
  }
  rx_bytes_ += wanted.bytes;
  bytes_done_ += wanted.bytes;
  --left_;
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
  elected_ = std::move(manifest);
  bytes_wanted_ = bytes_done_;
  try {
    plan();
  } catch (const std::bad_alloc&) {
    over_ = true;
    events_.over =
        Error{Code::internal_error, "no memory for the state that is to be received", {}, {}};
  }
}

// The sender gave a frame up half-way: it has left the sync, and the master will say so.
void Transfer::voided(const PeerId& from, const link::FrameHeader& header) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return;
  interrupted(header);
  if (!releasing_ && sources_.contains(from)) drop_source(from, "stopped sending");
}

// It comes again, on another stripe.
void Transfer::interrupted(const link::FrameHeader& header) {
  if (!active_ || SyncId{header.key.admission, header.key.sequence} != id_) return;
  if (header.segment == kManifestSegment) {
    manifest_placed_ = false;
  } else if (const auto it = wanted_.find(header.segment); it != wanted_.end()) {
    it->second.placed = false;
  }
}

Status Transfer::control(const PeerId& from, const link::FrameHeader& header,
                         std::span<const std::uint8_t> payload) {
  const SyncId id{header.key.admission, header.key.sequence};
  if (header.checksum == 0)  // any other was right
    return Status(Code::refused, "a request for state without a checksum");
  Fetch fetch;
  wire::Reader reader(payload);
  reader(fetch);
  if (!reader.complete() || fetch.chunks.size() > kWindow)
    return Status(Code::refused, "a malformed request for state");
  const bool now = active_ && id == id_;
  if (!now && id <= newest_) return {};  // of a sync that is over
  // Only who is to receive from us may read our memory.
  if (now && (phase_ != Phase::serving || !contains(partners_, from))) return {};
  if (!now) {
    auto& [sync, asked] = early_[from];
    if (id < sync) return {};
    if (id > sync) asked = {};
    sync = id;
  }
  Client& client = now ? clients_[from] : early_.at(from).second;
  if (client.chunks.size() + fetch.chunks.size() > kMaxClientQueue)
    return Status(Code::refused, "more chunks asked for than may be");
  client.manifest = client.manifest || fetch.manifest;
  for (const std::uint32_t chunk : fetch.chunks) {
    if (now && chunk >= my_index_->count())
      return Status(Code::refused, "a request for a chunk that does not exist");
    client.chunks.push_back(chunk);
  }
  if (now) links_.wake(from);
  return {};
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
    if (my_manifest_.empty()) {
      wire::Writer writer(my_manifest_);
      writer(mine_->manifest);
    }
    head.segment = kManifestSegment;
    frame.token = kManifestToken + token_;
    head.payload_bytes = static_cast<std::uint32_t>(my_manifest_.size());
    frame.payload.push_back(vec(my_manifest_.data(), my_manifest_.size()));
  } else if (!client.chunks.empty()) {
    head.segment = client.chunks.front();
    client.chunks.pop_front();
    const ChunkPlace place = my_index_->at(head.segment);
    head.payload_bytes = static_cast<std::uint32_t>(place.bytes);
    frame.payload.push_back(vec(mine_->entries[place.entry].data + place.offset, place.bytes));
    tx_bytes_ += place.bytes;
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
