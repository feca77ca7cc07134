#include "tests/simulation/sim_memory.h"

#include <cstdlib>
#include <utility>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::microseconds;
using std::chrono::milliseconds;

peer::LocalityOptions Memory::options() {
  peer::LocalityOptions options;
  if (world_.options.machines == 0) return options;
  options.make_region = [this](std::size_t size, memory::Access) -> Result<memory::RegionPtr> {
    if (world_.random.chance(world_.memory_refused)) {
      return Error{Code::internal_error, "simulated: no memory"};
    }
    std::shared_ptr<void> memory(std::calloc(1, size), std::free);  // NOLINT
    auto* data = static_cast<std::uint8_t*>(memory.get());
    return std::make_shared<memory::Region>(data, size, -1, std::move(memory));
  };
  options.find_array = [this](const void* data, std::size_t size) -> std::optional<memory::Place> {
    const auto it = arrays_.find(data);
    if (it == arrays_.end() || it->second.second->region->size() < size) return std::nullopt;
    return memory::Place{it->second.second, 0};
  };
  options.poll = [this] {
    for (const auto& [peer, known] : std::map(known_)) deliver(peer, known);
  };
  options.patience = milliseconds(500);
  // Either one step at a time, so that other peers run in between, or many, after which the others
  // see the memory before any message about it.
  options.group.moves =
      world_.random.chance(0.5) ? 1 : static_cast<int>(world_.random.between(2, 64));
  options.group.spin = microseconds(world_.random.between(0, 200));
  options.group.cores = static_cast<unsigned>(world_.random.between(1, 8));
  if (world_.options.everything_small) {
    options.group.inline_bytes = 64;
    options.group.least_segment_bytes = 64;
    options.group.segment_bytes = world_.block_bytes;
  }
  return options;
}

void Memory::carry_out(const peer::LocalityActions& actions) {
  for (const PeerId& peer : actions.drops) {
    const auto it = known_.find(peer);
    if (it == known_.end()) continue;
    const auto known = it->second;
    known_.erase(it);
    known->open = false;
    if (const Host* other = world_.host_of(peer)) world_.network.sever(host_.node(), other->node());
    world_.timeline.after(microseconds(world_.random.below(200)), [this, peer, known] {
      if (Host* other = world_.host_of(peer))
        other->memory().lose(host_.engine().session().id(), known);
    });
  }
  for (const auto& [peer, key] : actions.dials) connect(peer, key);
  for (const auto& [to, what, number, region] : actions.offers) {
    const auto it = known_.find(to);
    if (it == known_.end() || !it->second->open) continue;
    const auto known = it->second;
    const std::size_t side = known->peers[0] == to ? 0 : 1;
    known->offers[side].push_back({what, number, region});
    const Duration delay = world_.random.chance(0.1) ? milliseconds(world_.random.below(200))
                                                     : microseconds(world_.random.below(300));
    world_.timeline.after(delay, [this, peer = to, known] {
      Host* other = world_.host_of(peer);
      if (other == nullptr) return;
      other->run([other, known, from = host_.engine().session().id()] {
        other->memory().deliver(from, known);
        other->settle();
      });
    });
  }
  for (const PeerId& peer : actions.rings) {
    world_.timeline.after(microseconds(world_.random.below(200)), [this, peer] {
      Host* other = world_.host_of(peer);
      if (other != nullptr) other->run([other] { other->settle(); });
    });
  }
}

void Memory::forget_ended() {
  std::erase_if(arrays_, [](const auto& item) { return *item.second.first; });
}

void Memory::lay_out(const SyncingPtr& syncing) {
  forget_ended();
  const std::shared_ptr<const bool> ended(syncing, &syncing->ended);
  for (const auto& [name, bytes] : *syncing->live) {
    if (bytes.empty() || !world_.random.chance(world_.arrays_shared)) continue;
    const auto copy = std::make_shared<wire::Bytes>(bytes);
    syncing->shared.push_back(copy);
    auto region = std::make_shared<memory::Region>(copy->data(), copy->size(), -1, copy);
    auto chunk = std::make_shared<const memory::Chunk>(memory::Chunk{std::move(region), ++chunks_});
    arrays_[bytes.data()] = {ended, std::move(chunk)};
  }
}

void Memory::lay_out(const ReductionPtr& reduction) {
  forget_ended();
  const std::shared_ptr<const bool> ended(reduction, &reduction->ended);
  const auto add = [&](wire::Bytes& bytes) {
    if (bytes.empty() || !world_.random.chance(world_.arrays_shared)) return;
    auto region = std::make_shared<memory::Region>(bytes.data(), bytes.size(), -1, reduction);
    auto chunk = std::make_shared<const memory::Chunk>(memory::Chunk{std::move(region), ++chunks_});
    arrays_[bytes.data()] = {ended, std::move(chunk)};
  };
  for (ArrayData& array : reduction->arrays) {
    add(array.send);
    add(array.recv);
  }
}

void Memory::connect(const PeerId& peer, const MemoryKey& key) {
  world_.timeline.after(microseconds(world_.random.below(2000)), [this, peer, key] {
    Host* const other = world_.host_of(peer);
    const bool there = other != nullptr && other->alive() && other->machine() == host_.machine() &&
                       other->memory_key() == key;
    if (!host_.alive()) return;
    if (!there) {
      host_.run([this, peer] {
        host_.engine().connections(world_.now()).on_neighbour_down(peer, "refused");
        host_.settle();
      });
      return;
    }
    // As in a kernel, the connection is made even if the other process does not run now.
    auto known = std::make_shared<Acquaintance>();
    known->peers = {host_.engine().session().id(), peer};
    host_.run([this, peer, known] { accepted(peer, known); });
    other->run([other, known, from = host_.engine().session().id()] {
      other->memory().accepted(from, known);
    });
  });
}

void Memory::accepted(const PeerId& peer, const std::shared_ptr<Acquaintance>& known) {
  if (!known->open || host_.engine().standing() == peer::Standing::out) return;
  known_[peer] = known;
  host_.engine().connections(world_.now()).on_neighbour_up(peer);
  host_.settle();
}

void Memory::lose(const PeerId& peer, const std::shared_ptr<Acquaintance>& known) {
  host_.run([this, peer, known] {
    const auto it = known_.find(peer);
    if (it == known_.end() || it->second != known) return;
    deliver(peer, known);  // offers sent before the end are delivered first
    known_.erase(peer);
    if (const Host* other = world_.host_of(peer)) world_.network.sever(host_.node(), other->node());
    host_.engine().connections(world_.now()).on_neighbour_down(peer, "closed by the other end");
    host_.settle();
  });
}

void Memory::deliver(const PeerId& peer, const std::shared_ptr<Acquaintance>& known) {
  const auto it = known_.find(peer);
  if (it == known_.end() || it->second != known) return;
  auto& offers = known->offers[known->peers[0] == peer ? 1 : 0];
  while (!offers.empty()) {
    const Acquaintance::Offering offering = std::move(offers.front());
    offers.pop_front();
    const bool may_lack =
        offering.what == memory::Offer::array || offering.what == memory::Offer::scratch;
    if (may_lack && offering.region != nullptr && world_.memory_refused > 0 &&
        world_.random.chance(world_.memory_refused)) {
      host_.engine()
          .connections(world_.now())
          .on_neighbour_unmapped(peer, offering.what, offering.number, "simulated");
      continue;
    }
    host_.engine()
        .connections(world_.now())
        .on_neighbour_offer(peer, offering.what, offering.number, offering.region);
  }
}

void Memory::kill() {
  for (const auto& [peer, known] : std::exchange(known_, {})) {
    known->open = false;
    world_.timeline.after(microseconds(world_.random.below(500)),
                          [this, peer = peer, known = known] {
                            if (Host* other = world_.host_of(peer))
                              other->memory().lose(host_.engine().session().id(), known);
                          });
  }
}

void Memory::want_step() {
  if (step_planned_ || stepping_ || !host_.engine().locality().group().is_open()) return;
  step_planned_ = true;
  // A step takes time.
  const Duration delay = world_.random.chance(0.02) ? milliseconds(world_.random.below(5))
                                                    : microseconds(world_.random.below(30));
  world_.timeline.after(delay, [this] {
    step_planned_ = false;
    host_.run([this] { step(); });
  });
}

void Memory::strike_at_step(std::function<void()> what) {
  strike_ = std::move(what);
  // If no step makes progress, strike anyway.
  world_.timeline.after(milliseconds(world_.random.below(100)), [this] {
    if (strike_) std::exchange(strike_, nullptr)();
  });
}

void Memory::step() {
  const Pace pace = host_.engine().step(world_.now());
  if (strike_ && pace == Pace::working) std::exchange(strike_, nullptr)();
  // Runs once the process is thawed; never if it was killed.
  host_.run([this, pace] {
    stepping_ = true;
    host_.settle();
    stepping_ = false;
    if (pace != Pace::idle) want_step();
  });
}

}  // namespace pccl::simulation
