// What members of one host share while they reduce in memory: each a board of its own, which the
// others only read, and one page with the one word that all may change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pccl::memory {

// ---- the page ----------------------------------------------------------------------------------
//
// Operations are decided one after the other: `index` counts them, from 1 in every epoch. The word
// says how the latest one was decided, and what is known of the next.
struct Word {
  std::uint64_t index = 0;      // of the operation decided last
  bool committed = false;       // how; else it goes on over the network, with the master's verdict
  bool newcomers_wait = false;  // committed: somebody waits to be let in
  bool told = false;            // committed: the master has heard of it, and must hear of its end
  bool asked = false;           // of the next one: the master has heard of it
  bool spoilt = false;          // of the next one: it will not be committed here
  bool closed = false;          // the epoch is over: nothing is decided here any more
  bool operator==(const Word&) const = default;

  [[nodiscard]] constexpr std::uint64_t pack() const {
    return index << 8 | (committed ? 1U : 0U) | (newcomers_wait ? 2U : 0U) | (told ? 4U : 0U) |
           (asked ? 8U : 0U) | (spoilt ? 16U : 0U) | (closed ? 32U : 0U);
  }
  [[nodiscard]] static constexpr Word unpack(std::uint64_t bits) {
    return {bits >> 8,        (bits & 1U) != 0,  (bits & 2U) != 0, (bits & 4U) != 0,
            (bits & 8U) != 0, (bits & 16U) != 0, (bits & 32U) != 0};
  }
};

struct Page {
  alignas(64) std::atomic<std::uint64_t> word;
};
inline constexpr std::size_t kPageBytes = 4096;

// ---- a board -----------------------------------------------------------------------------------

// An index in an epoch, as one number that only grows.
[[nodiscard]] constexpr std::uint64_t position(std::uint64_t epoch, std::uint64_t index) {
  return epoch << 40 | index;
}

// Flags of an arrival.
inline constexpr std::uint64_t kReported = 1;     // the master has heard of the operation
inline constexpr std::uint64_t kInPlace = 2;      // results are kept until all have read them
inline constexpr std::uint64_t kSharedSends = 4;  // elements can be read where they are
inline constexpr std::uint64_t kSharedRecvs = 8;  // ... and results, where they are to go

// Where an array is, in the memory that its owner has offered: in place of its elements.
struct Spot {
  std::uint64_t send_chunk;
  std::uint64_t send_offset;
  std::uint64_t recv_chunk;
  std::uint64_t recv_offset;
};

// "I am in this operation": what must agree, and where my elements are. Fields are read while they
// may be written, so a reader compares the stamp before and after (a sequence lock).
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> stamp;     // odd while it is written
  std::atomic<std::uint64_t> position;  // 0: taken back
  std::atomic<std::uint64_t> admission;
  std::atomic<std::uint64_t> tag;
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> signature;
  std::atomic<std::uint64_t> flags;
  std::atomic<std::uint64_t> tagged;
};

// Fits behind the arrival: nobody waits for more than one thing.
inline constexpr std::size_t kInlineBytes = 16 << 10;
// Room for blocks on their way: of others' shares, and of this rank's results.
inline constexpr std::size_t kStageBytes = std::size_t{8} << 20;
inline constexpr std::size_t kResultBytes = std::size_t{1} << 20;

struct Board {
  Arrival arrivals[2];                               // in turn: the other one may still be read
  alignas(64) std::atomic<std::uint64_t> sleeping;   // wants to be rung when something moves
  alignas(64) std::atomic<std::uint64_t> collected;  // position up to which verdicts were seen
  alignas(64) std::atomic<std::uint64_t> done;       // position up to which results are there
  // Blocks, as (index << 24 | count) of the operation at hand.
  alignas(64) std::atomic<std::uint64_t> staged;
  alignas(64) std::atomic<std::uint64_t> reduced;
  alignas(64) std::atomic<std::uint64_t> gathered;
  alignas(64) std::atomic<std::uint64_t> scratch;  // number of the region that holds the results
  alignas(4096) std::uint8_t inlined[2][kInlineBytes];
  alignas(4096) std::uint8_t staging[kStageBytes];
  alignas(4096) std::uint8_t results[kResultBytes];
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
inline constexpr std::size_t kBoardBytes = sizeof(Board);

}  // namespace pccl::memory
