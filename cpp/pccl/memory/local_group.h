// Collectives among members that share a host: through memory, and decided there without the
// master. Sans-I/O: it reads and writes boards that its owner has mapped, one step at a time.
//
// Operations run one after the other, in the order in which rank 0 calls them. Some are not decided
// here but go on over the network, where the master decides: when members disagree, when there is
// no memory, or when other members wait for a call that is not made.
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
  collective::Collective what;
  std::uint64_t parts = 1;  // of each input array: as many as ranks if the collective scatters
  std::uint64_t signature = 0;
  ReduceOp op = ReduceOp::sum;
  std::vector<collective::ArrayRef> arrays;
  bool reported = false;  // the master knows that this member is in it, and must receive its end
  [[nodiscard]] std::uint64_t input_bytes(const collective::ArrayRef& array) const {
    return array.count * element_size(array.dtype) * parts;
  }
};

// An operation was committed in memory, and its arrays are not used any more. `told`: report it to
// the master as done.
struct LocalCommit {
  wire::OpKey key;
  collective::BytesMoved traffic;
  bool admission_due = false;
  bool told = false;
  // When every member had come to it, and when this member's results were there. Empty: just now.
  std::optional<Instant> met;
  std::optional<Instant> done;
};

// The owner of a local group. The group calls these methods from inside its own methods; they must
// not call the group.
class LocalHost {
 public:
  virtual ~LocalHost() = default;
  virtual void local_committed(const LocalCommit& commit) = 0;
  // The operation goes on over the network, in this epoch, for all members. It may not have been
  // called here yet, or be over.
  virtual void local_escalated(const wire::OpKey& key) = 0;
  // Wakes that rank: it sleeps, and something has moved.
  virtual void ring(std::uint32_t rank) = 0;
  [[nodiscard]] virtual bool admission_due() const = 0;
  // Memory of this member for others to read, and its number. On return the others have been
  // offered it, or will be soon.
  [[nodiscard]] virtual Result<std::pair<RegionPtr, std::uint64_t>> take_scratch(
      std::size_t bytes) = 0;
  // Scratch memory of another rank; null if it has not arrived here.
  [[nodiscard]] virtual RegionPtr scratch_of(std::uint32_t rank, std::uint64_t number) = 0;
  // Where others can read these bytes of this process, if they can.
  [[nodiscard]] virtual std::optional<Place> place_of(const void* data, std::size_t bytes) = 0;
  // Whether others can take the memory of all these chunks. If not, some of it may be shared for
  // later.
  [[nodiscard]] virtual bool may_share(const std::vector<ChunkPtr>& chunks) = 0;
  // Offers memory of this process to the others. True: an offer waits to be sent.
  virtual bool share(const ChunkPtr& chunk) = 0;
  // Array memory of another rank; null if it has not arrived here.
  [[nodiscard]] virtual RegionPtr array_of(std::uint32_t rank, std::uint64_t number) = 0;
  // Which memory of others has arrived here and could not be mapped.
  struct Unmapped {
    bool arrays = false;
    bool scratch = false;
  };
  [[nodiscard]] virtual Unmapped unmapped() const = 0;
};

struct LocalOptions {
  Duration spin = std::chrono::microseconds(200);
  // The longest wait for a call of rank 0 that was not made here, while other calls wait.
  Duration patience = std::chrono::milliseconds(1);
  std::uint32_t inline_bytes = 4 << 10;          // up to here every rank reads all inputs
  std::uint32_t segment_bytes = 128 << 10;       // the most of a block of larger ones
  std::uint32_t least_segment_bytes = 32 << 10;  // the least of a block, unless a share is less
  unsigned cores = 1;                            // with more ranks, waiting yields
  int moves = 64;                                // in one step; the simulator makes one at a time
};

// *one thread at a time: whoever drives the loop*
class LocalGroup {
 public:
  LocalGroup(const LocalOptions& options, LocalHost& host) : options_(options), host_(host) {}

  // Begins an epoch of a run whose members share this host. `boards` are in rank order;
  // boards[rank] is this member's.
  void open(std::uint64_t run, std::uint64_t epoch, std::uint32_t rank,
            std::vector<RegionPtr> boards, RegionPtr page);
  // Replaces a board. Its rank made the new one before it opened this epoch, but it arrives only
  // now.
  void replace_board(std::uint32_t rank, RegionPtr board);
  [[nodiscard]] bool is_open() const { return page_ != nullptr; }
  // Ends the epoch. A committed operation is completed (local_committed). All others are forgotten:
  // they are never committed here, and their arrays are not used any more. False: the result of a
  // committed operation cannot be read.
  [[nodiscard]] bool close();

  // Adds a call. Its arrays must stay valid until it ends. Allowed before open(). REQUIRES:
  // !escalated(key).
  void submit(LocalRequest request);
  // Whether all members run this operation of the present epoch over the network.
  [[nodiscard]] bool escalated(const wire::OpKey& key) const { return escalated_.contains(key); }
  [[nodiscard]] const std::set<wire::OpKey>& escalated() const { return escalated_; }
  // The operation is over: nobody asks whether it has moved to the network any more.
  void forget(const wire::OpKey& key) { escalated_.erase(key); }
  // Notes that the master will be told of the operation, so it must be told of its end too. False:
  // the operation is already committed, and the next step reports it.
  bool tell(const wire::OpKey& key);
  // The master has ended the operation. False: it is already committed, and the next step reports
  // it.
  bool withdraw(const wire::OpKey& key);

  Pace step(Instant now);
  // Call before polling stops: others ring from now on. False: something has moved meanwhile.
  [[nodiscard]] bool fall_asleep(Instant now);
  // When to call step() again, even if nobody has rung.
  [[nodiscard]] std::optional<Instant> next_deadline() const;
  [[nodiscard]] bool busy() const { return current_.has_value() || !order_.empty(); }
  // The page has a value that no correct member writes. The group does nothing any more.
  [[nodiscard]] bool broken() const { return broken_; }
  // Bytes exchanged with others so far: a measure of progress.
  [[nodiscard]] std::uint64_t moved() const { return moved_; }

 private:
  enum class Phase : std::uint8_t { meeting, combining, finished };
  struct Seen {  // a member's arrival at the present index
    wire::OpKey key;
    std::uint64_t signature = 0;
    std::uint64_t flags = 0;
    const std::uint8_t* inlined = nullptr;
  };
  struct Operation {
    LocalRequest request;
    std::uint64_t bytes = 0;   // of its inputs
    std::vector<Place> sends;  // by array, if others can read all of them; else empty
    std::vector<Place> recvs;
  };
  // The current operation.
  struct Current {
    wire::OpKey key;
    Phase phase = Phase::meeting;
    bool small = false;
    bool keep = false;          // results stay in scratch memory until the commit
    bool direct_sends = false;  // all elements are read from their arrays, not from a board
    bool direct_recvs = false;  // all results are read from their arrays
    collective::Layout layout;  // of the arrays; of one rank's part, if there are parts
    std::uint64_t stride = 0;   // bytes of a block
    std::uint64_t rounds = 0;   // blocks per rank
    std::uint64_t depth = 0;    // blocks in flight
    // Blocks that this rank has staged, reduced and gathered. A rank without one of these tasks
    // starts with that count complete.
    std::uint64_t staged = 0;
    std::uint64_t reduced = 0;
    std::uint64_t gathered = 0;
    std::uint64_t copied = 0;                             // segments, after the commit
    std::vector<RegionPtr> results;                       // by rank: scratch memory
    std::vector<std::vector<Spot>> spots;                 // by rank and array
    bool mapped = false;                                  // the arrays at `spots` are mapped here
    std::vector<std::vector<const std::uint8_t*>> sends;  // by other rank and array
    std::vector<std::vector<const std::uint8_t*>> recvs;
    std::vector<RegionPtr> held;  // memory of these
    collective::BytesMoved traffic;
    std::optional<Instant> met;  // empty for small ones, which are combined at the commit
    std::optional<Instant> done;
  };

  [[nodiscard]] Board& own() const;
  [[nodiscard]] const Board& board(std::uint32_t rank) const;
  [[nodiscard]] std::atomic<std::uint64_t>& word() const;
  [[nodiscard]] std::optional<Seen> seen(std::uint32_t rank) const;
  [[nodiscard]] std::uint64_t count_of(const std::atomic<std::uint64_t>& counter) const;
  [[nodiscard]] std::uint64_t least(std::atomic<std::uint64_t> Board::*counter) const;
  void publish(std::atomic<std::uint64_t> Board::*counter, std::uint64_t count);

  bool move(Instant now);  // does one thing; false: nothing to do
  bool collect(const Word& now);
  bool choose(Instant now, bool spoilt);
  bool all_open();
  void arrive(wire::OpKey key);
  void take_back();
  [[nodiscard]] bool all_here();
  bool meet(Instant now);
  void plan_blocks();
  bool combine(Instant now);
  bool results_here();
  bool arrays_here();
  bool missing(bool unmapped, Instant now);
  void find_places(Operation& operation);
  bool stage_block();
  bool reduce_block();
  bool gather_block();
  void copy_in(std::uint64_t segment, std::uint8_t* to, std::uint32_t rank);
  void copy_out(std::uint64_t segment, const std::uint8_t* from, std::uint32_t rank);
  void combine_segment(std::uint64_t segment, std::uint64_t round, std::uint8_t* to);
  void exchange_segment(std::uint64_t segment, std::uint64_t round);
  [[nodiscard]] const std::uint8_t* input_of(std::uint32_t rank, std::uint32_t array,
                                             std::uint64_t in_array, std::uint64_t round,
                                             std::uint64_t in_block) const;
  void combine_inlined();
  bool try_commit();
  bool finish(bool& complete);
  void spoil();
  bool advance();
  void ring_all();
  [[nodiscard]] bool is_small(std::uint64_t bytes) const {
    return bytes <= std::min<std::uint64_t>(options_.inline_bytes, kInlineBytes);
  }
  [[nodiscard]] const collective::Collective& what() const {
    return operations_.at(current_->key).request.what;
  }
  [[nodiscard]] std::uint64_t segment_of(std::uint64_t round, std::uint32_t rank) const;
  // The owner of a segment's result, and the round in which it makes it. REQUIRES: an all-reduce
  // or a broadcast.
  [[nodiscard]] std::pair<std::uint32_t, std::uint64_t> owner_of(std::uint64_t segment) const;
  [[nodiscard]] bool owns_results(std::uint32_t rank) const;
  [[nodiscard]] bool reads_inputs() const;

  LocalOptions options_;
  LocalHost& host_;
  std::uint64_t run_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint32_t rank_ = 0;
  std::vector<RegionPtr> boards_;
  RegionPtr page_;
  std::uint64_t index_ = 1;  // of the next operation to be decided
  std::map<wire::OpKey, Operation> operations_;
  std::deque<wire::OpKey> order_;  // own calls without the current one
  std::optional<Current> current_;
  std::vector<std::uint64_t> rung_;  // by rank: its sleep that was rung last
  std::vector<reduce::Contribution> contributions_;
  std::vector<Seen> others_;  // arrivals at `index_`, by rank, once all are there
  std::set<wire::OpKey> escalated_;
  std::uint32_t turn_ = 0;                // index of the next own arrival
  std::optional<Instant> waits_since_;    // rank 0's call was not made here
  std::optional<Instant> still_since_;    // nothing has moved
  std::optional<Instant> missing_since_;  // another rank's memory has not arrived
  bool offered_ = false;                  // this step has offered memory that others wait for
  bool broken_ = false;
  bool all_open_ = false;  // all boards are those of this epoch
  std::uint64_t moved_ = 0;
};

}  // namespace pccl::memory
