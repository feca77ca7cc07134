// Shared memory between simulated peers of one machine. Corresponds to node::Neighbours.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "pccl/peer/locality.h"
#include "tests/simulation/sim_network.h"

namespace pccl::simulation {

class World;
class Host;
struct Reduction;
using ReductionPtr = std::shared_ptr<Reduction>;
struct Syncing;
using SyncingPtr = std::shared_ptr<Syncing>;

// Two peers that are connected by memory. Both ends hold this object. The connection ends when
// either end drops it.
struct Acquaintance {
  struct Offering {
    memory::Offer what;
    std::uint64_t number;
    memory::RegionPtr region;
  };
  std::array<PeerId, 2> peers;
  std::array<std::deque<Offering>, 2> offers;  // in flight to that side
  bool open = true;
};

// A peer's acquaintances and its steps in memory.
class Memory {
 public:
  Memory(World& world, Host& host) : world_(world), host_(host) {}
  [[nodiscard]] peer::LocalityOptions options();
  void carry_out(const peer::LocalityActions& actions);
  // Plans a step, as the collective may have work.
  void want_step();
  // Makes the reduction's arrays, or some of them, readable by others until it is over.
  void lay_out(const ReductionPtr& reduction);
  // The same for the entries of a state. Others read copies, which are spoilt when the sync is
  // over: a member's program may change its arrays while slower members still read them.
  void lay_out(const SyncingPtr& syncing);
  void kill();  // the process ends
  [[nodiscard]] bool knows(const PeerId& peer) const { return known_.contains(peer); }
  // Calls `what` after the next step that makes progress, before its messages are sent.
  void strike_at_step(std::function<void()> what);

 private:
  friend class Host;
  void connect(const PeerId& peer, const MemoryKey& key);
  void accepted(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void lose(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void deliver(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void step();

  World& world_;
  Host& host_;
  std::map<PeerId, std::shared_ptr<Acquaintance>> known_;
  std::function<void()> strike_;
  void forget_ended();

  // By address: whether its call has ended, and the memory of an array.
  std::map<const void*, std::pair<std::shared_ptr<const bool>, memory::ChunkPtr>> arrays_;
  std::uint64_t chunks_ = 0;
  bool step_planned_ = false;
  bool stepping_ = false;
};

}  // namespace pccl::simulation
