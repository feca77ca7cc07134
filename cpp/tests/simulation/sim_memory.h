// Shared memory between simulated peers of one machine: what node::Neighbours is between real ones.
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

// Two peers that met. Both ends keep it; it is dead when one of them let go.
struct Acquaintance {
  struct Offering {
    memory::Offer what;
    std::uint64_t number;
    memory::RegionPtr region;
  };
  std::array<PeerId, 2> peers;
  std::array<std::deque<Offering>, 2> offers;  // to that side, on their way
  bool open = true;
};

// One peer's end of all its acquaintances, and its steps in memory.
class Memory {
 public:
  Memory(World& world, Host& host) : world_(world), host_(host) {}
  [[nodiscard]] peer::LocalityOptions options();
  void carry_out(const peer::LocalityActions& actions);
  // The collective may have something to do.
  void want_step();
  // Its arrays are where others can read them, as long as it is not over.
  void lay_out(const ReductionPtr& reduction);
  void kill();  // the process ends
  [[nodiscard]] bool knows(const PeerId& peer) const { return known_.contains(peer); }
  // Calls it after a step that moved something, before what that step wants sent is sent.
  void strike_at_step(std::function<void()> what);

 private:
  friend class Host;
  void connect(const PeerId& peer, const PeerId& word);
  void accepted(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void lose(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void deliver(const PeerId& peer, const std::shared_ptr<Acquaintance>& known);
  void step();

  World& world_;
  Host& host_;
  std::map<PeerId, std::shared_ptr<Acquaintance>> known_;
  std::function<void()> strike_;
  // By address: whose they are, and their memory.
  std::map<const void*, std::pair<ReductionPtr, memory::ChunkPtr>> arrays_;
  std::uint64_t chunks_ = 0;
  bool step_planned_ = false;
  bool stepping_ = false;
};

}  // namespace pccl::simulation
