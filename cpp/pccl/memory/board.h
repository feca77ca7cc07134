// The shared memory of members of one host that reduce in it. Every member has a board, which the
// others only read. One page has the one word that all may change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pccl::memory {

// -- the page
//
// Operations are decided one after the other; `index` counts them, from 1 in every epoch. The word
// has the decision on the latest one and the state of the next one.
struct Word {
  std::uint64_t index = 0;     // of the operation decided last
  bool committed = false;      // false: it goes on over the network, and the master decides
  bool admission_due = false;  // of a commit: the next admission point needs its round
  bool told = false;           // of a commit: the master knows it and must receive its end
  bool asked = false;          // of the next one: the master knows it
  bool spoilt = false;         // of the next one: it will not be committed here
  bool closed = false;         // the epoch is over: nothing more is decided here

  [[nodiscard]] constexpr std::uint64_t pack() const {
    return index << 8 | (committed ? 1U : 0U) | (admission_due ? 2U : 0U) | (told ? 4U : 0U) |
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

// -- a board

// An index in an epoch, as one number that only grows.
[[nodiscard]] constexpr std::uint64_t position(std::uint64_t epoch, std::uint64_t index) {
  return epoch << 40 | index;
}

// Flags of an arrival.
inline constexpr std::uint64_t kReported = 1;     // the master knows the operation
inline constexpr std::uint64_t kInPlace = 2;      // results stay in scratch memory until the commit
inline constexpr std::uint64_t kSharedSends = 4;  // others can read the input arrays directly
inline constexpr std::uint64_t kSharedRecvs = 8;  // others can read the result arrays directly
inline constexpr std::uint64_t kNoArrays = 16;    // it cannot map arrays of others
inline constexpr std::uint64_t kNoScratch = 32;   // it cannot map scratch memory of others

// The place of an array in memory that its owner has offered. It is announced instead of the
// array's elements.
struct Spot {
  std::uint64_t send_chunk;
  std::uint64_t send_offset;
  std::uint64_t recv_chunk;
  std::uint64_t recv_offset;
};

// Announces that a member is in an operation: the fields that must agree, and where its elements
// are. A reader may read while the owner writes, so it compares the stamp before and after (a
// sequence lock).
struct alignas(64) Arrival {
  std::atomic<std::uint64_t> stamp;     // odd during a write
  std::atomic<std::uint64_t> position;  // 0: none yet
  std::atomic<std::uint64_t> admission;
  std::atomic<std::uint64_t> tag;
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> signature;
  std::atomic<std::uint64_t> flags;
  std::atomic<std::uint64_t> tagged;
};

// Bytes that are announced with an arrival, so that no other wait is needed.
inline constexpr std::size_t kInlineBytes = 16 << 10;
// Room for blocks in flight: elements for other owners, and this rank's results.
inline constexpr std::size_t kStageBytes = std::size_t{8} << 20;
inline constexpr std::size_t kResultBytes = std::size_t{1} << 20;

struct Board {
  Arrival arrivals[2];                               // used in turn: others may read the other one
  alignas(64) std::atomic<std::uint64_t> sleeping;   // counts; odd: asleep, wants to be rung
  alignas(64) std::atomic<std::uint64_t> collected;  // position of the last decision that was seen
  std::atomic<std::uint64_t> run;                    // in which its owner is a member; 0: in none
  alignas(64) std::atomic<std::uint64_t> done;       // position of the last operation done
  // Numbers of blocks of the current operation, as (index << 24 | count).
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
