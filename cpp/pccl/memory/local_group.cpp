#include "pccl/memory/local_group.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pccl::memory {
namespace {

constexpr std::uint64_t kCountBits = 24;
// Spinning time before this rank yields its core.
constexpr Duration kSpinAlone = std::chrono::microseconds(20);
// Longest sleep: a ring may be lost with its connection.
constexpr Duration kSafety = std::chrono::milliseconds(50);
constexpr std::size_t kMaxSpots = kInlineBytes / sizeof(Spot);  // arrays that others read directly
// Copied in one move, so that a step stays short.
constexpr std::uint64_t kCopiedBytes = std::uint64_t{1} << 20;

constexpr std::uint64_t counted(std::uint64_t index, std::uint64_t count) {
  return index << kCountBits | count;
}

// Whether results must not be written before the commit: they are written over inputs, which a
// failed operation has to leave as they are. An all-gather in place writes what is there already.
bool overwrites_inputs(const LocalRequest& request, std::uint32_t rank) {
  using collective::Kind;
  const Kind kind = request.what.kind;
  if (kind != Kind::all_reduce && (kind != Kind::broadcast || request.what.root == rank))
    return false;
  return std::any_of(request.arrays.begin(), request.arrays.end(),
                     [](const auto& array) { return array.count > 0 && array.send == array.recv; });
}

}  // namespace

// -- boards and the page

Board& LocalGroup::own() const { return *reinterpret_cast<Board*>(boards_[rank_]->data()); }

const Board& LocalGroup::board(std::uint32_t rank) const {
  return *reinterpret_cast<const Board*>(boards_[rank]->data());
}

std::atomic<std::uint64_t>& LocalGroup::word() const {
  return reinterpret_cast<Page*>(page_->data())->word;
}

// The arrival of `rank` at the present index, if it is there.
std::optional<LocalGroup::Seen> LocalGroup::seen(std::uint32_t rank) const {
  const std::uint64_t here = position(epoch_, index_);
  const Board& from = board(rank);
  for (std::size_t turn = 0; turn < 2; ++turn) {
    const Arrival& arrival = from.arrivals[turn];
    const std::uint64_t stamp = arrival.stamp.load(std::memory_order_acquire);
    if (stamp % 2 != 0 || arrival.position.load(std::memory_order_relaxed) != here) continue;
    Seen found;
    found.key.admission = arrival.admission.load(std::memory_order_relaxed);
    found.key.tagged = arrival.tagged.load(std::memory_order_relaxed) != 0;
    found.key.tag = arrival.tag.load(std::memory_order_relaxed);
    found.key.sequence = arrival.sequence.load(std::memory_order_relaxed);
    found.signature = arrival.signature.load(std::memory_order_relaxed);
    found.flags = arrival.flags.load(std::memory_order_relaxed);
    found.inlined = from.inlined[turn];
    std::atomic_thread_fence(std::memory_order_acquire);
    if (arrival.stamp.load(std::memory_order_relaxed) == stamp) return found;
  }
  return std::nullopt;
}

// REQUIRES: that rank's arrival was seen, so the counter is of the present index or older.
std::uint64_t LocalGroup::count_of(const std::atomic<std::uint64_t>& counter) const {
  const std::uint64_t value = counter.load(std::memory_order_acquire);
  constexpr std::uint64_t kIndexMask = ~std::uint64_t{0} >> kCountBits;
  if (value >> kCountBits != (index_ & kIndexMask)) return 0;
  return value & ((1U << kCountBits) - 1);
}

// The lowest count among the other ranks.
std::uint64_t LocalGroup::least(std::atomic<std::uint64_t> Board::*counter) const {
  std::uint64_t count = ~std::uint64_t{0};
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (rank != rank_) count = std::min(count, count_of(board(rank).*counter));
  }
  return count;
}

void LocalGroup::publish(std::atomic<std::uint64_t> Board::*counter, std::uint64_t count) {
  (own().*counter).store(counted(index_, count), std::memory_order_release);
}

void LocalGroup::ring_all() {
  // Pairs with the fence of fall_asleep(). A rank sees what was published before it falls asleep,
  // or this rank sees that it sleeps.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (rank == rank_) continue;
    const std::uint64_t sleep = board(rank).sleeping.load(std::memory_order_relaxed);
    if (sleep % 2 == 0 || rung_[rank] == sleep) continue;
    rung_[rank] = sleep;
    host_.ring(rank);
  }
}

// -- opening and closing

void LocalGroup::open(std::uint64_t run, std::uint64_t epoch, std::uint32_t rank,
                      std::vector<RegionPtr> boards, RegionPtr page) {
  run_ = run;
  epoch_ = epoch;
  rank_ = rank;
  boards_ = std::move(boards);
  page_ = std::move(page);
  index_ = 1;
  rung_.assign(boards_.size(), 0);
  others_.clear();
  waits_since_.reset();
  still_since_.reset();
  missing_since_.reset();
  broken_ = false;
  all_open_ = false;
  own().done.store(0, std::memory_order_relaxed);
  own().run.store(run_, std::memory_order_relaxed);
  own().collected.store(position(epoch_, 0), std::memory_order_release);
  ring_all();
}

void LocalGroup::replace_board(std::uint32_t rank, RegionPtr board) {
  if (rank >= boards_.size() || rank == rank_) return;
  boards_[rank] = std::move(board);
  rung_[rank] = 0;
  others_.clear();  // they point into the old board
  all_open_ = false;
  still_since_.reset();
}

bool LocalGroup::close() {
  bool complete = true;
  if (page_ != nullptr) {
    std::uint64_t bits = word().load(std::memory_order_acquire);
    for (;;) {
      const Word now = Word::unpack(bits);
      if (now.index == index_ && now.committed) {
        // The operation is committed for all remaining members, even if others fail now. The
        // results are in memory that outlives its owners.
        if (collect(now)) continue;
        complete = false;
        break;
      }
      if (now.closed) break;
      Word closed = now;
      closed.closed = true;
      if (word().compare_exchange_strong(bits, closed.pack())) break;
    }
  }
  operations_.clear();
  order_.clear();
  current_.reset();
  others_.clear();
  escalated_.clear();
  boards_.clear();
  page_.reset();
  return complete;
}

// -- calls

void LocalGroup::submit(LocalRequest request) {
  const wire::OpKey key = request.key;
  Operation& operation = operations_[key];
  for (const collective::ArrayRef& array : request.arrays)
    operation.bytes += request.input_bytes(array);
  operation.request = std::move(request);
  find_places(operation);
  order_.push_back(key);
  still_since_.reset();
}

// Finds the places of the arrays, if others can read them directly.
void LocalGroup::find_places(Operation& operation) {
  const std::vector<collective::ArrayRef>& arrays = operation.request.arrays;
  if (is_small(operation.bytes) || arrays.size() > kMaxSpots) return;
  const auto find = [&](auto address, std::vector<Place>& places) {
    for (const collective::ArrayRef& array : arrays) {
      if (array.count == 0) {
        places.emplace_back();
        continue;
      }
      std::optional<Place> place =
          host_.place_of(address(array), operation.request.input_bytes(array));
      if (!place) return places.clear();
      places.push_back(std::move(*place));
    }
  };
  find([](const collective::ArrayRef& array) { return array.send; }, operation.sends);
  if (operation.request.what.kind == collective::Kind::all_reduce)
    find([](const collective::ArrayRef& array) { return array.recv; }, operation.recvs);
}

bool LocalGroup::tell(const wire::OpKey& key) {
  const auto it = operations_.find(key);
  if (it == operations_.end()) return true;
  it->second.request.reported = true;
  if (!current_ || current_->key != key) return true;
  std::uint64_t bits = word().load(std::memory_order_acquire);
  for (;;) {
    Word next = Word::unpack(bits);
    if (next.index == index_) return !next.committed;
    if (next.asked || next.closed) return true;
    next.asked = true;
    if (word().compare_exchange_weak(bits, next.pack())) return true;
  }
}

bool LocalGroup::withdraw(const wire::OpKey& key) {
  if (!operations_.contains(key)) return true;
  if (current_ && current_->key == key) {
    if (const Word now = Word::unpack(word().load(std::memory_order_acquire));
        now.index == index_ && now.committed) {
      return false;
    }
    spoil();
    const Word now = Word::unpack(word().load(std::memory_order_acquire));
    if (now.index == index_ && now.committed) return false;
    current_.reset();
  } else {
    std::erase(order_, key);
  }
  operations_.erase(key);
  return true;
}

// Ensures that the operation at the present index, whichever it is, is not committed here.
void LocalGroup::spoil() {
  missing_since_.reset();
  std::uint64_t bits = word().load(std::memory_order_acquire);
  for (;;) {
    Word next = Word::unpack(bits);
    if (next.index == index_ || next.spoilt || next.closed) return;
    next.spoilt = true;
    if (word().compare_exchange_weak(bits, next.pack())) break;
  }
  ring_all();
}

// -- steps

Pace LocalGroup::step(Instant now) {
  if (page_ == nullptr) return Pace::idle;
  std::atomic<std::uint64_t>& sleeping = own().sleeping;
  const std::uint64_t sleep = sleeping.load(std::memory_order_relaxed);
  if (sleep % 2 != 0) sleeping.store(sleep + 1, std::memory_order_relaxed);
  bool moved = false;
  offered_ = false;
  for (int i = 0; i < options_.moves && !offered_ && page_ != nullptr && move(now); ++i)
    moved = true;
  if (moved) {
    still_since_.reset();
    return Pace::working;
  }
  if (!busy()) return Pace::idle;
  if (!still_since_ || now - *still_since_ >= kSafety) still_since_ = now;
  const Duration waited = now - *still_since_;
  if (waited >= options_.spin) return Pace::idle;
  // The rank that this one waits for may need this core. Spinning would only delay it.
  const bool crowded = boards_.size() > options_.cores || waited >= kSpinAlone;
  return crowded ? Pace::yielding : Pace::spinning;
}

bool LocalGroup::fall_asleep(Instant now) {
  if (page_ == nullptr) return true;
  std::atomic<std::uint64_t>& sleeping = own().sleeping;
  const std::uint64_t sleep = sleeping.load(std::memory_order_relaxed);
  if (sleep % 2 == 0) sleeping.store(sleep + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // A rank that moved before this one was asleep did not ring.
  if (!move(now)) return true;
  still_since_.reset();
  return false;
}

std::optional<Instant> LocalGroup::next_deadline() const {
  if (page_ == nullptr || !busy()) return std::nullopt;
  std::optional<Instant> next;
  if (still_since_) next = *still_since_ + kSafety;
  if (waits_since_)
    next = std::min(next.value_or(Instant::max()), *waits_since_ + options_.patience);
  return next;
}

// Does the most urgent thing.
bool LocalGroup::move(Instant now) {
  if (broken_) return false;
  const Word last = Word::unpack(word().load(std::memory_order_acquire));
  if (last.index == index_) return collect(last);
  if (last.index + 1 != index_) {
    broken_ = true;
    return false;
  }
  if (last.closed || last.spoilt) waits_since_.reset();
  if (last.closed) return false;
  if (last.spoilt) {
    if (advance()) return true;
    // Rank 0's arrival is still to come. It names the operation that goes over the network.
    return choose(now, true);
  }
  if (choose(now, false)) return true;
  if (!current_) return false;
  if (current_->phase == Phase::meeting) {
    if (meet(now)) return true;
    // The others will need these blocks in any case.
    return !current_->small && operations_.at(current_->key).sends.empty() &&
           current_->staged < current_->depth && stage_block();
  }
  if (current_->phase == Phase::combining) return combine(now);
  return try_commit();
}

// Acts on the decision at the present index. False: nothing to do.
bool LocalGroup::collect(const Word& now) {
  if (now.committed) {
    // No other rank can commit without this one.
    if (!current_ || (!current_->small && current_->phase != Phase::finished)) {
      broken_ = true;
      return false;
    }
    bool complete = false;
    if (!finish(complete)) return false;
    if (!complete) return true;
    const wire::OpKey key = current_->key;
    const LocalCommit commit{key,      current_->traffic, now.admission_due,
                             now.told, current_->met,     current_->done};
    operations_.erase(key);
    current_.reset();
    own().collected.store(position(epoch_, index_), std::memory_order_release);
    ++index_;
    turn_ ^= 1U;
    others_.clear();
    host_.local_committed(commit);
    ring_all();
    return true;
  }
  const std::optional<Seen> first = seen(0);
  // Rank 0 cannot overwrite its arrival before this rank has collected the decision.
  if (!first) return false;
  const wire::OpKey key = first->key;
  if (current_) {
    if (current_->key != key) order_.push_front(current_->key);
    current_.reset();
  }
  std::erase(order_, key);
  escalated_.insert(key);
  operations_.erase(key);
  own().collected.store(position(epoch_, index_), std::memory_order_release);
  ++index_;
  turn_ ^= 1U;
  others_.clear();
  waits_since_.reset();
  host_.local_escalated(key);
  ring_all();
  return true;
}

// Chooses the next operation: rank 0 takes its first call, and the others follow.
bool LocalGroup::choose(Instant now, bool spoilt) {
  if (!all_open()) return false;
  if (rank_ == 0) {
    if (current_ || order_.empty() || seen(0)) return false;
    arrive(order_.front());
    return true;
  }
  const std::optional<Seen> first = seen(0);
  if (!first) {
    waits_since_.reset();
    if (current_ || order_.empty()) return false;
    arrive(order_.front());  // most likely rank 0's choice
    return true;
  }
  if (current_ && current_->key == first->key) return false;
  if (operations_.contains(first->key)) {
    take_back();
    arrive(first->key);
    return true;
  }
  if (spoilt || !busy()) return false;
  // The call was not made here. In this program it may come after the call that waits.
  if (!waits_since_) waits_since_ = now;
  if (now - *waits_since_ < options_.patience) return false;
  waits_since_.reset();
  spoil();
  return true;
}

// Whether every board here is the one that its owner uses in this epoch of this run. This rank does
// not arrive before: the others could commit with it unnoticed. A newcomer that never learned of
// its admission may be a member of another run, in an epoch of the same number.
bool LocalGroup::all_open() {
  for (std::uint32_t rank = 0; !all_open_ && rank < boards_.size(); ++rank) {
    if (board(rank).collected.load(std::memory_order_acquire) < position(epoch_, 0) ||
        board(rank).run.load(std::memory_order_relaxed) != run_)
      return false;
  }
  all_open_ = true;
  return true;
}

// Takes back an arrival from before rank 0's choice was known.
void LocalGroup::take_back() {
  if (!current_) return;
  order_.push_front(current_->key);
  current_.reset();
}

void LocalGroup::arrive(wire::OpKey key) {
  std::erase(order_, key);
  waits_since_.reset();
  missing_since_.reset();
  Operation& operation = operations_.at(key);
  const auto& [kind, root] = operation.request.what;
  if (kind == collective::Kind::broadcast && root != rank_) operation.sends.clear();
  if (!operation.sends.empty() || !operation.recvs.empty()) {
    std::vector<ChunkPtr> chunks;
    for (const auto* places : {&operation.sends, &operation.recvs}) {
      for (const Place& place : *places)
        if (place.chunk != nullptr) chunks.push_back(place.chunk);
    }
    if (!host_.may_share(chunks)) {
      operation.sends.clear();
      operation.recvs.clear();
    }
  }
  Current& current = current_.emplace(Current{});
  current.key = key;
  current.small = is_small(operation.bytes);
  Board& mine = own();
  if (!current.small) plan_blocks();
  mine.staged.store(counted(index_, current.staged), std::memory_order_relaxed);
  mine.reduced.store(counted(index_, current.reduced), std::memory_order_relaxed);
  mine.gathered.store(counted(index_, current.gathered), std::memory_order_relaxed);

  Arrival& arrival = mine.arrivals[turn_];
  const std::uint64_t stamp = arrival.stamp.load(std::memory_order_relaxed);
  arrival.stamp.store(stamp + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  if (current.small) {
    std::uint8_t* to = mine.inlined[turn_];
    for (const collective::ArrayRef& array : operation.request.arrays) {
      const std::size_t bytes = operation.request.input_bytes(array);
      if (bytes > 0) std::memcpy(to, array.send, bytes);
      to += bytes;
    }
  } else if (!operation.sends.empty() || !operation.recvs.empty()) {
    for (std::size_t i = 0; i < operation.request.arrays.size(); ++i) {
      Spot spot{};
      const auto say = [&](const std::vector<Place>& places, std::uint64_t& chunk,
                           std::uint64_t& offset) {
        if (places.empty() || places[i].chunk == nullptr) return;
        chunk = places[i].chunk->number;
        offset = places[i].offset;
        // Send the offer before the next move: others wait for it.
        offered_ = host_.share(places[i].chunk) || offered_;
      };
      say(operation.sends, spot.send_chunk, spot.send_offset);
      say(operation.recvs, spot.recv_chunk, spot.recv_offset);
      std::memcpy(mine.inlined[turn_] + i * sizeof spot, &spot, sizeof spot);
    }
  }
  const auto unmapped = current.small ? LocalHost::Unmapped{} : host_.unmapped();
  arrival.position.store(position(epoch_, index_), std::memory_order_relaxed);
  arrival.admission.store(key.admission, std::memory_order_relaxed);
  arrival.tagged.store(key.tagged ? 1 : 0, std::memory_order_relaxed);
  arrival.tag.store(key.tag, std::memory_order_relaxed);
  arrival.sequence.store(key.sequence, std::memory_order_relaxed);
  arrival.signature.store(operation.request.signature, std::memory_order_relaxed);
  arrival.flags.store((operation.request.reported ? kReported : 0U) |
                          (overwrites_inputs(operation.request, rank_) ? kInPlace : 0U) |
                          (operation.sends.empty() ? 0U : kSharedSends) |
                          (operation.recvs.empty() ? 0U : kSharedRecvs) |
                          (unmapped.arrays ? kNoArrays : 0U) | (unmapped.scratch ? kNoScratch : 0U),
                      std::memory_order_relaxed);
  arrival.stamp.store(stamp + 2, std::memory_order_release);
  ring_all();
}

// Whether all ranks have called the current operation. If so, `others_` is filled.
bool LocalGroup::all_here() {
  if (!others_.empty()) return true;
  std::vector<Seen> here;
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    const std::optional<Seen> there = seen(rank);
    if (!there || there->key != current_->key) return false;
    here.push_back(*there);
  }
  others_ = std::move(here);
  return true;
}

// Begins the current operation when all ranks are in it.
bool LocalGroup::meet(Instant now) {
  Current& current = *current_;
  if (!all_here()) return false;
  const Operation& operation = operations_.at(current.key);
  bool keep = false;
  bool map_arrays = true;  // every rank can map those of others
  bool map_scratch = true;
  bool sends = true;
  bool recvs = true;
  for (const Seen& there : others_) {
    if (there.signature != operation.request.signature) {
      spoil();  // the master finds the member that differs
      return true;
    }
    keep = keep || (there.flags & kInPlace) != 0;
    map_arrays = map_arrays && (there.flags & kNoArrays) == 0;
    map_scratch = map_scratch && (there.flags & kNoScratch) == 0;
    sends = sends && (there.flags & kSharedSends) != 0;
    recvs = recvs && (there.flags & kSharedRecvs) != 0;
  }
  if (current.small) {
    current.phase = Phase::finished;
    return try_commit();
  }
  if (keep && !map_scratch) {
    spoil();
    return true;
  }
  current.keep = keep;
  if (what().kind == collective::Kind::broadcast) {
    // With `keep`, members copy after the commit, when the root may change its array. This rank's
    // own count of arrays bounds what is read, whatever the root says.
    sends = !keep && (others_[what().root].flags & kSharedSends) != 0 &&
            operation.request.arrays.size() <= kMaxSpots;
  }
  current.direct_sends = sends && map_arrays;
  current.direct_recvs = recvs && map_arrays && !keep;
  if (current.direct_sends || current.direct_recvs) {
    // Copied, because array_of() may replace the board that has them.
    for (const Seen& there : others_) {
      std::vector<Spot>& spots = current.spots.emplace_back(operation.request.arrays.size());
      std::memcpy(spots.data(), there.inlined, spots.size() * sizeof(Spot));
    }
  }
  if (keep) current.results.resize(boards_.size());
  if (keep && owns_results(rank_)) {
    const auto scratch = host_.take_scratch(current.rounds * current.stride);
    if (!scratch) {
      spoil();
      return true;
    }
    current.results[rank_] = scratch->first;
    // Send the offer before the next move: others wait for it.
    if (own().scratch.exchange(scratch->second, std::memory_order_relaxed) != scratch->second)
      offered_ = true;
  }
  current.met = now;
  current.phase = Phase::combining;
  return true;
}

// -- the decision

bool LocalGroup::try_commit() {
  if (!all_here()) return false;
  const std::uint64_t here = position(epoch_, index_);
  const Current& current = *current_;
  bool told = operations_.at(current.key).request.reported;
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (!current.small && board(rank).done.load(std::memory_order_acquire) != here) return false;
    told = told || (others_[rank].flags & kReported) != 0;
  }
  std::uint64_t bits = word().load(std::memory_order_acquire);
  for (;;) {
    const Word now = Word::unpack(bits);
    if (now.index == index_ || now.spoilt || now.closed) return now.index == index_;
    Word next;
    next.index = index_;
    next.committed = true;
    next.admission_due = host_.admission_due();
    next.told = told || now.asked;
    if (word().compare_exchange_weak(bits, next.pack())) break;
  }
  ring_all();
  return true;
}

// Moves results of a committed operation to the caller's arrays, a part at a time. `complete`: all
// are there. False: nothing to do.
bool LocalGroup::finish(bool& complete) {
  Current& current = *current_;
  if (current.small) {
    // Another rank may have seen all arrivals first. They stay until this rank collects.
    if (!all_here()) return false;
    combine_inlined();
    complete = true;
    return true;
  }
  complete = !current.keep;
  if (complete) return true;
  std::uint64_t copied = 0;
  while (current.copied < current.layout.segments.size() && copied < kCopiedBytes) {
    const std::uint64_t index = current.copied++;
    const std::uint64_t bytes = current.layout.segments[index].raw_bytes;
    const auto [from, round] = owner_of(index);
    copy_out(index, current.results[from]->data() + round * current.stride, from);
    copied += bytes;
    moved_ += bytes;
    if (from != rank_) current.traffic.rx_bytes += bytes;
  }
  complete = current.copied == current.layout.segments.size();
  return true;
}

// Moves past a spoilt operation, when all have seen the decision before it.
bool LocalGroup::advance() {
  const std::uint64_t before = position(epoch_, index_ - 1);
  for (std::uint32_t rank = 0; rank < boards_.size(); ++rank) {
    if (board(rank).collected.load(std::memory_order_acquire) < before) return false;
  }
  if (!seen(0)) return false;
  std::uint64_t bits = word().load(std::memory_order_acquire);
  for (;;) {
    const Word now = Word::unpack(bits);
    if (now.index == index_ || now.closed) return now.index == index_;
    Word next;
    next.index = index_;
    if (word().compare_exchange_weak(bits, next.pack())) break;
  }
  ring_all();
  return true;
}

}  // namespace pccl::memory
