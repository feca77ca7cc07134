// Memory shared by the parent and the forked workers of `pccl_stress kills` and `freezes`. Every
// field has one writer. A worker's fields remain when it is killed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "pccl/base/ids.h"
#include "pccl/wire/records.h"

namespace pccl::stress {

constexpr std::size_t kSlots = 4;  // workers of a group
constexpr std::size_t kEvents = 256;

// The size of an operation: inline, up to a few blocks per rank, or many.
enum class Size : std::uint32_t { tiny, medium, large };
constexpr std::size_t kSizes = 3;

// Counted from the last admission, like wire::OpKey.
struct Key {
  std::uint64_t admission = 0;
  std::uint64_t sequence = 0;
  auto operator<=>(const Key&) const = default;
};

// The end of an operation, or of this peer's membership.
struct Event {
  enum class Kind : std::uint32_t { committed, failed, out } kind = Kind::committed;
  PeerId self;
  Key key;  // out: the operation in progress, which others may have committed
  std::uint64_t epoch = 0;
  std::uint64_t attempts = 0;
  bool counted = false;  // its traffic shows whether it ran in memory
  bool in_memory = false;
  wire::Digest digest;  // of the result
  std::uint64_t world = 0;
  std::array<PeerId, kSlots> members;
};

enum class Stage : std::uint32_t { elsewhere, reducing, checking };

struct Slot {
  // -- the worker's
  PeerId self;
  std::atomic<Stage> stage{Stage::elsewhere};
  Key key;  // of the operation under way; set before the stage is
  std::atomic<Size> size{Size::tiny};
  std::atomic<std::uint64_t> world{0};     // of the latest operation, if it ran in memory
  std::atomic<std::uint64_t> armed{0};     // latest order that it has accepted
  std::atomic<std::uint64_t> verified{0};  // latest freeze that left its arrays unchanged
  std::atomic<std::uint64_t> written{0};
  std::array<Event, kEvents> events;
  std::array<char, 256> failure{};

  // -- the parent's
  std::atomic<std::uint64_t> read{0};
  // The worker signals itself in its next operation of this size, after `at` thousandths of its
  // duration.
  std::atomic<std::uint64_t> order{0};
  int signal = 0;
  Size order_size = Size::tiny;
  std::uint64_t at = 0;
};

// Written by the parent, for all workers of a group.
struct Orders {
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> frozen{0};    // number of the latest freeze
  std::atomic<std::uint64_t> reported{0};  // latest freeze whose victim reported its eviction
};

struct Group {
  Orders orders;
  std::array<Slot, kSlots> slots;
};

}  // namespace pccl::stress
