// The collective of members that share a host: through memory, and decided there, without the
// master. Sans-I/O: it reads and writes boards that somebody else mapped, one step at a time.
//
// Operations are taken in the order in which rank 0 calls them, one after the other. Whatever does
// not fit (members that disagree, no memory, a call that others wait for in vain) is not decided
// here: it goes on over the network, where the master decides.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "pccl/base/dtype.h"
#include "pccl/base/error.h"
#include "pccl/base/pace.h"
#include "pccl/collective/executor.h"
#include "pccl/collective/schedule.h"
#include "pccl/memory/arrays.h"
#include "pccl/memory/board.h"
#include "pccl/memory/region.h"
#include "pccl/reduce/reduce.h"
#include "pccl/wire/records.h"

namespace pccl::memory {

struct LocalRequest {
  wire::OpKey key;
  std::uint64_t signature = 0;
  ReduceOp op = ReduceOp::sum;
  std::vector<collective::ArrayRef> arrays;
  bool reported = false;  // the master knows that we are in it, and must hear of its end
};

// What a local group needs around it. Called from inside its methods, which it must not call back.
class LocalHost {
 public:
  virtual ~LocalHost() = default;
  // The operation is over here, its arrays are not used any more.
  virtual void local_committed(const wire::OpKey& key, const collective::Traffic& traffic,
                               bool newcomers_wait, bool told) = 0;
  // It goes on over the network, in this epoch, for all members.
  virtual void local_escalated(const wire::OpKey& key) = 0;
  // This rank sleeps, and something has moved.
  virtual void ring(std::uint32_t rank) = 0;
  [[nodiscard]] virtual bool newcomers_wait() const = 0;
  // Memory of our own for others to read, and what they know it by. Known to them before this
  // returns, or soon.
  [[nodiscard]] virtual Result<std::pair<RegionPtr, std::uint64_t>> take_scratch(
      std::size_t bytes) = 0;
  // Another rank's; null when it did not arrive here.
  [[nodiscard]] virtual RegionPtr scratch_of(std::uint32_t rank, std::uint64_t number) = 0;
  // Where others can read these bytes of ours, if they can.
  [[nodiscard]] virtual std::optional<Place> place_of(const void* data, std::size_t bytes) = 0;
  // Whether others would take the memory of all these. If not, some of it is shared for later.
  [[nodiscard]] virtual bool may_share(const std::vector<ChunkPtr>& chunks) = 0;
  // Others need that memory of ours. True: it is on its way only now.
  virtual bool share(const ChunkPtr& chunk) = 0;
  // Another rank's memory of arrays; null when it did not arrive here.
  [[nodiscard]] virtual RegionPtr array_of(std::uint32_t rank, std::uint64_t number) = 0;
};

struct LocalOptions {
  Duration spin = std::chrono::microseconds(200);
  Duration patience = std::chrono::milliseconds(1);  // for rank 0's call, while others wait here
  std::uint32_t inline_bytes = 4 << 10;              // up to here everybody combines everything
  std::uint32_t segment_bytes = 128 << 10;           // of larger ones, at most
  std::uint32_t least_segment_bytes = 32 << 10;      // ... unless a rank's share is less
  unsigned cores = 1;                                // with more ranks than that, waiting yields
  int moves = 64;  // of one step; the simulator takes one at a time
};

// *one thread at a time: whoever drives the loop*
class LocalGroup {
 public:
  LocalGroup(const LocalOptions& options, LocalHost& host) : options_(options), host_(host) {}

  // A new epoch whose members, `boards` in rank order, share this host. `mine` is boards[rank].
  void open(std::uint64_t epoch, std::uint32_t rank, std::vector<RegionPtr> boards, RegionPtr page);
  // That rank's board is another one, which it made before it opened this epoch: it was not here.
  void replace_board(std::uint32_t rank, RegionPtr board);
  [[nodiscard]] bool is_open() const { return page_ != nullptr; }
  // The epoch is over. What was committed ends (local_committed); the rest is forgotten, and never
  // committed here, and its arrays are not used any more.
  // False: an operation was committed, and its result cannot be had.
  [[nodiscard]] bool close();

  // Arrays must stay valid until it ends. Also before open(). REQUIRES: !escalated(key).
  void submit(LocalRequest request);
  // All members leave this operation of the present epoch to the network.
  [[nodiscard]] bool escalated(const wire::OpKey& key) const { return escalated_.contains(key); }
  // The master is told that we are in it, so it must hear of its end. False: it is decided already,
  // and the next step says how.
  bool tell(const wire::OpKey& key);
  // The master ended it. False: too late, it is committed; the next step says so.
  bool withdraw(const wire::OpKey& key);

  Pace step(Instant now);
  // Before the caller stops looking: others ring from now on. False when something moved meanwhile.
  [[nodiscard]] bool fall_asleep(Instant now);
  // When to look again, rung or not.
  [[nodiscard]] std::optional<Instant> next_deadline() const;
  [[nodiscard]] bool busy() const { return current_.has_value() || !order_.empty(); }
  // The page says what no member can have written: it counts for nothing any more.
  [[nodiscard]] bool broken() const { return broken_; }
  // Bytes that others read from here and we read from them: whether anything moves.
  [[nodiscard]] std::uint64_t moved() const { return moved_; }

 private:
  enum class Phase : std::uint8_t { meeting, combining, finished };
  struct Seen {  // another member's arrival at the present index
    wire::OpKey key;
    std::uint64_t signature = 0;
    std::uint64_t flags = 0;
    const std::uint8_t* inlined = nullptr;
  };
  struct Operation {
    LocalRequest request;
    std::uint64_t bytes = 0;
    bool in_place = false;
    std::vector<Place> sends;  // by array, when all are where others can read them; else nothing
    std::vector<Place> recvs;
  };
  // The operation at hand.
  struct Current {
    wire::OpKey key;
    Phase phase = Phase::meeting;
    bool small = false;
    bool keep = false;          // results stay in scratch memory until the commit
    bool direct_sends = false;  // everybody's elements are read where they are, not staged
    bool direct_recvs = false;  // and results from where they are to go
    collective::Layout layout;
    std::uint64_t stride = 0;  // bytes of a block
    std::uint64_t rounds = 0;  // blocks per rank
    std::uint64_t depth = 0;   // blocks under way at a time
    std::uint64_t staged = 0;
    std::uint64_t reduced = 0;
    std::uint64_t gathered = 0;
    std::uint64_t copied = 0;              // segments, once it is committed
    std::vector<RegionPtr> results;        // by rank: where they are kept
    std::vector<std::vector<Spot>> spots;  // by rank and array: where what is read there is
    bool mapped = false;                   // all of that is here
    std::vector<std::vector<const std::uint8_t*>> sends;  // of the others, by rank and array
    std::vector<std::vector<const std::uint8_t*>> recvs;
    std::vector<RegionPtr> held;  // what these point into
    collective::Traffic traffic;
  };

  [[nodiscard]] Board& own() const;
  [[nodiscard]] const Board& board(std::uint32_t rank) const;
  [[nodiscard]] std::atomic<std::uint64_t>& word() const;
  [[nodiscard]] std::optional<Seen> seen(std::uint32_t rank) const;
  [[nodiscard]] std::uint64_t count_of(const std::atomic<std::uint64_t>& counter) const;
  [[nodiscard]] std::uint64_t least(std::atomic<std::uint64_t> Board::*counter) const;
  void publish(std::atomic<std::uint64_t> Board::*counter, std::uint64_t count);

  bool move(Instant now);  // one thing; false when there is nothing to do
  bool collect(const Word& now);
  bool choose(Instant now, bool spoilt);
  bool all_open();
  void arrive(wire::OpKey key);
  void take_back();
  [[nodiscard]] bool all_here();
  bool meet();
  void plan_blocks();
  bool combine(Instant now);
  bool results_here();
  bool arrays_here();
  bool missing(Instant now);
  void find_places(Operation& operation);
  bool stage_block();
  bool reduce_block();
  bool gather_block();
  void copy_out(std::uint64_t segment, const std::uint8_t* from, std::uint32_t rank);
  bool try_commit();
  bool finish(bool& complete);
  void spoil();
  bool advance();
  void ring_all();
  [[nodiscard]] bool is_small(std::uint64_t bytes) const {
    return bytes <= std::min<std::uint64_t>(options_.inline_bytes, kInlineBytes);
  }
  [[nodiscard]] std::uint32_t owner(std::uint64_t segment) const {
    return static_cast<std::uint32_t>(segment % boards_.size());
  }
  [[nodiscard]] std::uint64_t segment_of(std::uint64_t round, std::uint32_t rank) const {
    return round * boards_.size() + rank;
  }

  LocalOptions options_;
  LocalHost& host_;
  std::uint64_t epoch_ = 0;
  std::uint32_t rank_ = 0;
  std::vector<RegionPtr> boards_;
  RegionPtr page_;
  std::uint64_t index_ = 1;  // of the next operation to be decided
  std::map<wire::OpKey, Operation> operations_;
  std::deque<wire::OpKey> order_;  // of our calls, without the current one
  std::optional<Current> current_;
  std::vector<std::uint64_t> rung_;  // by rank: the sleep in which we rang last
  std::vector<reduce::Contribution> contributions_;
  std::vector<Seen> others_;  // arrivals at `index_`, by rank, once all are there
  std::set<wire::OpKey> escalated_;
  std::uint32_t turn_ = 0;                // which of our arrivals is next
  std::optional<Instant> waits_since_;    // for a call of rank 0's that we have not made
  std::optional<Instant> still_since_;    // nothing moved
  std::optional<Instant> missing_since_;  // another's results are ready, and not mapped here
  bool offered_ = false;                  // in this step, memory that others wait for
  bool broken_ = false;
  bool all_open_ = false;  // all boards are those of this epoch
  std::uint64_t moved_ = 0;
};

}  // namespace pccl::memory
