#include "pccl/peer/locality.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

constexpr std::size_t kMaxArrays = 4096;   // that one peer offers at a time
constexpr std::size_t kMaxNewArrays = 64;  // offered or withdrawn at once
constexpr std::size_t kKept = 4;           // pages and scratch regions of a neighbour, at most
// A neighbour whose connection broke has most likely ended. Wait, so that the master learns of the
// loss before it learns that memory is not shared.
constexpr Duration kGrace = std::chrono::seconds(1);
// The first and the longest pause before connecting again.
constexpr Duration kFirstPause = std::chrono::milliseconds(500);
constexpr Duration kLastPause = std::chrono::seconds(30);
constexpr Duration kSettled = std::chrono::seconds(10);  // one that lasts so long has not failed
constexpr std::size_t kMiB = std::size_t{1} << 20;
// Scratch memory that was far too large for this time is replaced.
constexpr Duration kScratchKept = std::chrono::seconds(10);
constexpr std::size_t kFarTooLarge = 4;  // times what is needed

}  // namespace

// -- neighbours

void Locality::choose(const std::vector<wire::Member>& peers, std::uint64_t joined, Instant now) {
  if (!options_.make_region || failed_) return;
  for (auto it = neighbours_.begin(); it != neighbours_.end();) {
    const bool wanted = std::any_of(peers.begin(), peers.end(),
                                    [&](const auto& peer) { return peer.id == it->first; });
    // Keep for a while a neighbour that connected before the master named it.
    const Neighbour& neighbour = it->second;
    const bool early = neighbour.memory_key.empty() && neighbour.connected &&
                       now - neighbour.since < options_.patience;
    if (wanted || early) {
      ++it;
      continue;
    }
    actions_.drops.push_back(it->first);
    it = neighbours_.erase(it);
  }
  for (const wire::Member& peer : peers) {
    if (peer.id == self_ || peer.memory_key.empty()) continue;
    const auto [it, fresh] = neighbours_.try_emplace(peer.id);
    if (!fresh && !it->second.memory_key.empty()) continue;
    it->second.memory_key = peer.memory_key;
    it->second.dials = joined > peer.joined;
    if (!fresh) {
      give(peer.id, it->second);
      continue;
    }
    it->second.pending = true;
    it->second.since = now;
    if (it->second.dials) actions_.dials.push_back({peer.id, peer.memory_key});
  }
  claim();
}

void Locality::on_up(const PeerId& peer, Instant now) {
  if (failed_) return;
  // It may connect before the master names it.
  Neighbour& neighbour = neighbours_[peer];
  neighbour.connected = true;
  neighbour.since = now;
  neighbour.redial_at = {};
  neighbour.given_board.reset();
  neighbour.given_scratch = neighbour.given_page = 0;
  neighbour.given_arrays.clear();
  neighbour.arrays.clear();
  neighbour.unmapped_arrays.clear();
  neighbour.unmapped_scratch = false;
  ++gifts_;
  give(peer, neighbour);
}

void Locality::on_down(const PeerId& peer, const std::string& reason, Instant now) {
  const auto it = neighbours_.find(peer);
  if (it == neighbours_.end()) return;
  Neighbour& neighbour = it->second;
  if (neighbour.connected || neighbour.pending) {
    events_.emplace_back(
        LocalNotice{LogLevel::debug, "no memory shared with " + peer.brief() +
                                         (neighbour.connected ? " any more: " : ": ") + reason});
  }
  if (neighbour.connected && now - neighbour.since >= kSettled) neighbour.failures = 0;
  neighbour.connected = false;
  neighbour.pending = false;
  neighbour.since = now;
  if (neighbour.dials && !failed_) {
    Duration pause = kFirstPause;
    for (unsigned i = 0; i < neighbour.failures && pause < kLastPause; ++i) pause *= 2;
    neighbour.redial_at = now + std::min(pause, kLastPause);
    ++neighbour.failures;
  }
  claim();
}

void Locality::on_offered(const PeerId& peer, memory::Offer what, std::uint64_t number,
                          const memory::RegionPtr& region) {
  const auto it = neighbours_.find(peer);
  if (it == neighbours_.end()) return;
  Neighbour& neighbour = it->second;
  if (what == memory::Offer::scratch) {
    // This may arrive in the middle of an operation: do nothing else here.
    neighbour.scratch[number] = region;
    neighbour.unmapped_scratch = false;
    if (neighbour.scratch.size() > kKept) neighbour.scratch.erase(neighbour.scratch.begin());
    return;
  }
  if (what == memory::Offer::array) {
    if (region == nullptr) {
      neighbour.arrays.erase(number);
      neighbour.unmapped_arrays.erase(number);
    } else if (neighbour.arrays.size() < kMaxArrays) {
      neighbour.arrays[number] = region;
    }
    return;
  }
  if (what == memory::Offer::board) {
    neighbour.board = region;
    neighbour.board_number = number;
    neighbour.pending = false;
    // The collective may have opened with its previous board: this peer did not see the departure
    // for which the neighbour made a new one.
    const auto rank = std::find(ranks_.begin(), ranks_.end(), peer);
    if (group_.is_open() && number <= epoch_ && rank != ranks_.end())
      group_.replace_board(static_cast<std::uint32_t>(rank - ranks_.begin()), region);
    claim();
  } else {
    neighbour.pages[number] = region;
    if (neighbour.pages.size() > kKept) neighbour.pages.erase(neighbour.pages.begin());
  }
  try_open();
}

// All members learn with this one's next arrival that it lacks the memory.
void Locality::on_unmapped(const PeerId& peer, memory::Offer what, std::uint64_t number,
                           const std::string& reason) {
  const auto it = neighbours_.find(peer);
  if (it == neighbours_.end()) return;
  if (!std::exchange(warned_unmapped_, true)) {
    events_.emplace_back(LocalNotice{
        LogLevel::warn, "cannot map memory of " + peer.brief() + " (" + reason +
                            "): operations on this host are slower; see ulimit -v, ulimit -n and "
                            "vm.max_map_count"});
  }
  Neighbour& neighbour = it->second;
  if (what == memory::Offer::scratch) {
    neighbour.unmapped_scratch = true;
  } else if (what == memory::Offer::array && neighbour.unmapped_arrays.size() < kMaxArrays) {
    neighbour.unmapped_arrays.insert(number);
  }
}

void Locality::on_time(Instant now) {
  if (failed_) return;
  for (auto& [peer, neighbour] : neighbours_) {
    if (neighbour.pending && now - neighbour.since >= options_.patience) neighbour.pending = false;
    if (!neighbour.connected && !neighbour.pending && neighbour.board != nullptr &&
        now - neighbour.since >= kGrace) {
      neighbour.board.reset();
    }
    if (neighbour.redial_at != Instant{} && now >= neighbour.redial_at) {
      neighbour.redial_at = {};
      actions_.dials.push_back({peer, neighbour.memory_key});
    }
  }
  forget_arrays();
  claim();
  try_open();
}

std::optional<Instant> Locality::next_deadline() const {
  std::optional<Instant> next = group_.next_deadline();
  if (failed_) return next;
  for (const auto& [peer, neighbour] : neighbours_) {
    if (neighbour.redial_at != Instant{})
      next = std::min(next.value_or(Instant::max()), neighbour.redial_at);
  }
  return next;
}

// Reports the peers with which this one shares memory, if they have changed.
void Locality::claim() {
  wire::Neighbourhood claimed;
  if (!failed_) {
    for (const auto& [peer, neighbour] : neighbours_) {
      if (neighbour.board != nullptr) claimed.peers.push_back(peer);
      if (neighbour.pending) ++claimed.pending;
    }
  }
  if (claimed == claimed_) return;
  claimed_ = claimed;
  events_.emplace_back(std::move(claimed));
}

// Memory was refused: this peer, and with it its host, reduces over TCP from now on.
void Locality::fail(const std::string& what) {
  if (failed_) return;
  failed_ = true;
  events_.emplace_back(
      LocalNotice{LogLevel::warn, "no shared memory (" + what + "): reducing over TCP"});
  for (const auto& [peer, neighbour] : neighbours_) actions_.drops.push_back(peer);
  claim();
}

// -- memory

bool Locality::make_board() {
  if (board_ != nullptr) return true;
  auto made = options_.make_region(memory::kBoardBytes, memory::Access::read);
  if (!made) {
    fail(made.error().reason);
    return false;
  }
  board_ = std::move(*made);
  return true;
}

bool Locality::shares_with(const PeerId& peer) const {
  const auto it = neighbours_.find(peer);
  const auto rank = std::find(ranks_.begin(), ranks_.end(), peer);
  if (rank == ranks_.end() || hosts_.size() != ranks_.size() ||
      hosts_[static_cast<std::size_t>(rank - ranks_.begin())] != hosts_[rank_])
    return false;
  return !failed_ && it != neighbours_.end() && it->second.connected &&
         it->second.board != nullptr && !it->second.memory_key.empty();
}

bool Locality::is_member(const PeerId& peer) const {
  return std::find(ranks_.begin(), ranks_.end(), peer) != ranks_.end();
}

// Offers the memory that a neighbour lacks and may have. A newcomer gets our board, so that the
// master knows before the admission which peers share memory. A member gets all that its epoch
// needs. A peer that the master has not named gets nothing.
void Locality::give(const PeerId& peer, Neighbour& neighbour) {
  if (failed_ || !neighbour.connected || neighbour.memory_key.empty() || !make_board()) return;
  if (neighbour.given_board != board_number_) {
    neighbour.given_board = board_number_;
    actions_.offers.push_back({peer, memory::Offer::board, board_number_, board_});
  }
  if (!is_member(peer)) return;
  if (scratch_ != nullptr && neighbour.given_scratch != scratch_number_) {
    neighbour.given_scratch = scratch_number_;
    actions_.offers.push_back({peer, memory::Offer::scratch, scratch_number_, scratch_});
  }
  if (active_ && rank_ == 0 && page_ != nullptr && neighbour.given_page != epoch_) {
    neighbour.given_page = epoch_;
    actions_.offers.push_back({peer, memory::Offer::page, epoch_, page_});
  }
}

void Locality::give_members() {
  for (auto& [peer, neighbour] : neighbours_) {
    if (is_member(peer)) give(peer, neighbour);
  }
}

Result<std::pair<memory::RegionPtr, std::uint64_t>> Locality::take_scratch(std::size_t bytes) {
  if (scratch_ != nullptr) {
    scratch_wanted_ = std::max(scratch_wanted_, bytes);
    if (scratch_->size() / kFarTooLarge <= std::max(bytes, kMiB)) {
      scratch_since_ = now_;
      scratch_wanted_ = 0;
    }
  }
  const bool far_too_large = scratch_ != nullptr && now_ - scratch_since_ >= kScratchKept;
  if (scratch_ == nullptr || scratch_->size() < bytes || far_too_large) {
    // Take a quarter more, so that growing arrays do not need new memory each time.
    const std::size_t most = far_too_large ? scratch_wanted_ : bytes;
    const std::size_t size = (most + most / 4 + kMiB - 1) / kMiB * kMiB;
    auto made = options_.make_region(size, memory::Access::read);
    if (!made) {
      events_.emplace_back(LocalNotice{LogLevel::warn, "no shared memory for results (" +
                                                           made.error().reason +
                                                           "): this operation goes over TCP"});
      return made.error();
    }
    scratch_ = std::move(*made);
    ++scratch_number_;
    scratch_wanted_ = 0;
    scratch_since_ = now_;
    give_members();
  }
  return std::pair(scratch_, scratch_number_);
}

memory::RegionPtr Locality::scratch_of(std::uint32_t rank, std::uint64_t number) {
  const auto look = [&]() -> memory::RegionPtr {
    const auto neighbour = neighbours_.find(ranks_[rank]);
    if (neighbour == neighbours_.end()) return nullptr;
    auto& scratch = neighbour->second.scratch;
    const auto found = scratch.find(number);
    if (found == scratch.end()) return nullptr;
    // Older ones are out of use: the owner changes to a new one only after all members have read
    // the results in the old one.
    scratch.erase(scratch.begin(), found);
    return found->second;
  };
  if (memory::RegionPtr found = look()) return found;
  if (options_.poll) options_.poll();
  return look();
}

std::optional<memory::Place> Locality::place_of(const void* data, std::size_t bytes) {
  if (!options_.find_array) return std::nullopt;
  return options_.find_array(data, bytes);
}

// Neighbours keep a limited number of arrays, and a channel holds a limited number of offers.
bool Locality::may_share(const std::vector<memory::ChunkPtr>& chunks) {
  std::map<std::uint64_t, memory::ChunkPtr> unknown;
  std::size_t fresh = 0;
  for (const memory::ChunkPtr& chunk : chunks) {
    const auto it = shared_.find(chunk->number);
    if (it != shared_.end() && it->second.given == gifts_) continue;
    if (unknown.emplace(chunk->number, chunk).second && it == shared_.end()) ++fresh;
  }
  if (shared_.size() + fresh > kMaxArrays) return false;
  if (unknown.size() <= kMaxNewArrays) return true;
  std::size_t left = kMaxNewArrays;
  for (const auto& [number, chunk] : unknown) {
    if (left-- == 0) break;
    (void)share(chunk);
  }
  return false;
}

bool Locality::share(const memory::ChunkPtr& chunk) {
  Shared& shared = shared_[chunk->number];
  if (shared.given == gifts_) return false;
  shared = {chunk, gifts_};
  bool sent = false;
  for (auto& [peer, neighbour] : neighbours_) {
    if (!neighbour.connected || !is_member(peer)) continue;
    sent = give_array(peer, neighbour, *chunk) || sent;
  }
  return sent;
}

// False: the neighbour has it.
bool Locality::give_array(const PeerId& peer, Neighbour& neighbour, const memory::Chunk& chunk) {
  if (!neighbour.given_arrays.insert(chunk.number).second) return false;
  actions_.offers.push_back({peer, memory::Offer::array, chunk.number, chunk.region});
  return true;
}

std::optional<state::SharedBytes> Locality::share(const PeerId& peer, const std::uint8_t* data,
                                                  std::uint64_t bytes) {
  if (!shares_with(peer)) return std::nullopt;
  const auto place = place_of(data, bytes);
  if (!place) return std::nullopt;
  const std::uint64_t number = place->chunk->number;
  if (!shared_.contains(number)) {
    if (shared_.size() >= kMaxArrays) return std::nullopt;
    shared_[number].chunk = place->chunk;
  }
  transferring_ = true;
  (void)give_array(peer, neighbours_.at(peer), *place->chunk);
  return state::SharedBytes{number, place->offset};
}

std::optional<std::span<const std::uint8_t>> Locality::memory_of(const PeerId& peer,
                                                                 std::uint64_t number) const {
  const auto it = neighbours_.find(peer);
  if (it == neighbours_.end()) return std::nullopt;
  const Neighbour& neighbour = it->second;
  const auto found = neighbour.arrays.find(number);
  if (found != neighbour.arrays.end())
    return std::span<const std::uint8_t>(found->second->data(), found->second->size());
  if (neighbour.unmapped_arrays.contains(number)) return std::span<const std::uint8_t>();
  return std::nullopt;
}

memory::RegionPtr Locality::array_of(std::uint32_t rank, std::uint64_t number) {
  const auto look = [&]() -> memory::RegionPtr {
    const auto neighbour = neighbours_.find(ranks_[rank]);
    if (neighbour == neighbours_.end()) return nullptr;
    const auto found = neighbour->second.arrays.find(number);
    return found == neighbour->second.arrays.end() ? nullptr : found->second;
  };
  if (memory::RegionPtr found = look()) return found;
  if (options_.poll) options_.poll();
  return look();
}

Locality::Unmapped Locality::unmapped() const {
  Unmapped any;
  for (const auto& [peer, neighbour] : neighbours_) {
    any.arrays = any.arrays || !neighbour.unmapped_arrays.empty();
    any.scratch = any.scratch || neighbour.unmapped_scratch;
  }
  return any;
}

// Withdraws the arrays that are gone here, or were only needed for a transfer of state, so that
// neighbours unmap their memory.
void Locality::forget_arrays() {
  std::size_t left = kMaxNewArrays;
  for (auto it = shared_.begin(); it != shared_.end() && left > 0;) {
    const bool needed = it->second.given != 0 || transferring_;
    if (needed && !it->second.chunk.expired()) {
      ++it;
      continue;
    }
    --left;
    for (auto& [peer, neighbour] : neighbours_) {
      if (neighbour.given_arrays.erase(it->first) > 0 && neighbour.connected)
        actions_.offers.push_back({peer, memory::Offer::array, it->first, nullptr});
    }
    it = shared_.erase(it);
  }
}

// Called between epochs, when all results have been read. Next, a neighbour uses the newest scratch
// memory that it has sent, or one still to come.
void Locality::forget_stale(std::uint64_t epoch) {
  for (auto& [peer, neighbour] : neighbours_) {
    auto& pages = neighbour.pages;
    auto& scratch = neighbour.scratch;
    pages.erase(pages.begin(), pages.lower_bound(epoch));
    if (scratch.size() > 1) scratch.erase(scratch.begin(), std::prev(scratch.end()));
  }
}

// -- epochs

void Locality::begin_epoch(std::uint64_t run, const Record& record) {
  const bool departed = std::any_of(record->departures.begin(), record->departures.end(),
                                    [](const auto& gone) { return !gone.id.empty(); });
  // A departed member may only be frozen, and read our memory when it wakes up. New memory leaves
  // the old contents unchanged for it. All members decide this alike, with or without a board.
  if (departed && !failed_) {
    board_number_ = record->epoch;
    scratch_.reset();
    if (std::exchange(board_, nullptr) != nullptr) (void)make_board();
    for (const wire::Member& member : record->members) {
      const auto it = neighbours_.find(member.id);
      if (it != neighbours_.end()) it->second.board_needed = record->epoch;
    }
  }
  forget_stale(record->epoch);
  run_ = run;
  epoch_ = record->epoch;
  page_.reset();
  ranks_.clear();
  for (std::uint32_t rank = 0; rank < record->members.size(); ++rank) {
    ranks_.push_back(record->members[rank].id);
    if (record->members[rank].id == self_) rank_ = rank;
  }
  ++gifts_;
  hosts_ = record->plan.hosts;
  active_ = topology::on_one_host(record->plan);
  if (active_ && rank_ == 0 && !failed_) {
    auto made = options_.make_region(memory::kPageBytes, memory::Access::write);
    if (made) {
      page_ = std::move(*made);
    } else {
      fail(made.error().reason);
    }
  }
  give_members();
  try_open();
}

// Opens the collective once all boards and the page are here.
void Locality::try_open() {
  if (!active_ || failed_ || group_.is_open() || board_ == nullptr) return;
  std::vector<memory::RegionPtr> boards;
  for (const PeerId& peer : ranks_) {
    if (peer == self_) {
      boards.push_back(board_);
      continue;
    }
    const auto it = neighbours_.find(peer);
    if (it == neighbours_.end() || it->second.board == nullptr ||
        it->second.board_number < it->second.board_needed) {
      return;
    }
    boards.push_back(it->second.board);
    if (peer == ranks_[0]) {
      const auto page = it->second.pages.find(epoch_);
      if (page != it->second.pages.end()) page_ = page->second;
    }
  }
  if (page_ == nullptr) return;
  group_.open(run_, epoch_, rank_, std::move(boards), page_);
}

}  // namespace pccl::peer
