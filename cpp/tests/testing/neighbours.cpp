// Peers of one host that find each other, for tests/test_neighbours.py.
#include "pccl/node/neighbours.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <asio/io_context.hpp>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pccl/memory/board.h"
#include "pccl/peer/locality.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using pccl::memory::Offer;
using pccl::memory::RegionPtr;

pccl::node::NeighbourEvents counted(std::size_t& up, std::size_t& down) {
  return {[&up](const pccl::PeerId&) { ++up; },
          [&down](const pccl::PeerId&, const std::string&) { ++down; },
          [](const pccl::PeerId&, Offer, std::uint64_t, const RegionPtr&) {},
          [](const pccl::PeerId&, Offer, std::uint64_t, const std::string&) {}, [] {}};
}

// So many peers connect to one, which accepts all of them before any of them runs again. The number
// of those with which it shares memory then, and of those that lost it.
std::pair<std::size_t, std::size_t> connect_at_once(std::size_t peers) {
  asio::io_context here;
  asio::io_context there;
  std::size_t up = 0;
  std::size_t down = 0;
  std::size_t up_there = 0;
  const auto self = pccl::PeerId::random();
  const auto key = pccl::HostKey::random();
  pccl::node::Neighbours listener(here, self, key, 0, counted(up, down));
  if (!listener.listen()) throw std::runtime_error("it cannot listen");
  std::vector<std::unique_ptr<pccl::node::Neighbours>> others;
  for (std::size_t i = 0; i < peers; ++i) {
    others.push_back(std::make_unique<pccl::node::Neighbours>(there, pccl::PeerId::random(), key, 0,
                                                              counted(up_there, down)));
    others.back()->connect(self, key);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while (up_there + down < peers && std::chrono::steady_clock::now() < end) {
    while (here.poll() > 0) {
    }
    while (there.poll() > 0) {
    }
  }
  return {up, down};
}

// A neighbour's connection breaks so many times, after those seconds. The pauses before the next
// one, in seconds.
std::vector<double> redial_pauses(const std::vector<double>& lasted) {
  using Seconds = std::chrono::duration<double>;
  pccl::peer::LocalityOptions options;
  options.make_region = pccl::memory::make_region;
  const auto self = pccl::PeerId::random();
  pccl::peer::Locality locality(options, self);
  pccl::wire::Member other;
  other.id = pccl::PeerId::random();
  other.memory_key = pccl::MemoryKey::random();
  other.joined = 1;
  pccl::Instant now{std::chrono::hours(1)};
  locality.choose({other}, 2, now);
  const auto board =
      pccl::memory::make_region(pccl::memory::kBoardBytes, pccl::memory::Access::read);
  if (!board) throw std::runtime_error(board.error().reason);
  std::vector<double> pauses;
  for (const double seconds : lasted) {
    locality.on_up(other.id, now);
    locality.on_offered(other.id, Offer::board, 0, *board);
    now += std::chrono::round<pccl::Duration>(Seconds(seconds));
    locality.on_down(other.id, "closed by the other end", now);
    const auto next = locality.next_deadline();
    if (!next) throw std::runtime_error("it does not connect again");
    pauses.push_back(Seconds(*next - now).count());
    now = *next;
    locality.on_time(now);
  }
  return pauses;
}

}  // namespace

void bind_neighbours(nb::module_& m) {
  m.def("connect_at_once", &connect_at_once, "peers"_a);
  m.def("redial_pauses", &redial_pauses, "lasted"_a);
}
