// Stress test: a master and peers as threads of one process, over loopback. Peers join and leave
// continuously while they share a state, reduce, abort calls and are visited by strangers. Every
// result is checked against its contributors, and the states of all members against each other.
// Meant to run under the address, undefined-behaviour and thread sanitizers. PCCL_STRESS_SECONDS:
// duration, 20 by default. `cuts`: the same without shared memory, while connections between peers
// are cut one by one. With PCCL_SECRET all connections are encrypted. `kills`, `freezes` and
// `memory` are other programs: see kills.h and memory.h.

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "pccl/memory/arrays.h"
#include "pccl/node/communicator.h"
#include "pccl/server/server.h"
#include "pccl/state/manifest.h"
#include "tests/stress/kills.h"
#include "tests/stress/memory.h"

namespace pccl::stress {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::size_t kPeers = 5;

struct Totals {
  std::atomic<std::uint64_t> joins{0};
  std::atomic<std::uint64_t> reductions{0};
  std::atomic<std::uint64_t> reruns{0};
  std::atomic<std::uint64_t> given_up{0};
  std::atomic<std::uint64_t> syncs{0};
  std::atomic<std::uint64_t> state_bytes{0};
  std::atomic<std::uint64_t> strangers{0};
  std::atomic<std::uint64_t> cuts{0};
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::abort();
}

// A peer's contribution to every element, which follows from its id.
std::int64_t value_of(const PeerId& id) {
  std::uint32_t value = 0;
  std::memcpy(&value, id.bytes.data(), 3);
  return value;
}

std::int64_t sum_over(const wire::EpochRecord& record) {
  std::int64_t sum = 0;
  for (const wire::Member& member : record.members) sum += value_of(member.id);
  return sum;
}

constexpr float kLargestFloat = 40;

float float_of(const PeerId& id, std::size_t index) {
  return static_cast<float>((static_cast<std::size_t>(value_of(id)) + index) % 1000) *
         (kLargestFloat / 1000);
}

// Connects, sends foreign bytes, and disconnects.
void visit(std::uint16_t port, std::mt19937_64& rng, Totals& totals) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    std::vector<std::uint8_t> noise(rng() % 300);
    for (std::uint8_t& byte : noise) byte = static_cast<std::uint8_t>(rng());
    if (noise.size() > 4 && rng() % 2 == 0) std::memcpy(noise.data(), "PCCL", 4);
    if (noise.size() > 4 && rng() % 4 == 0) std::memcpy(noise.data(), "PCF1", 4);
    (void)!::send(fd, noise.data(), noise.size(), MSG_NOSIGNAL);
    ++totals.strangers;
  }
  ::close(fd);
}

// The port at an end of a TCP connection; 0: it is not a TCP connection.
template <class Ask>
std::uint16_t port_of(int fd, Ask ask) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (ask(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET)
    return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6)
    return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

// Cuts a random connection between two peers of this process, as a router might.
void cut_one(std::uint16_t master_port, std::mt19937_64& rng, Totals& totals) {
  DIR* const folder = ::opendir("/proc/self/fd");
  if (folder == nullptr) return;
  int chosen = -1;
  std::uint64_t seen = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    // Use a duplicate: the descriptor may be closed and reused at any time.
    int copy = fd > 2 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (copy < 0) continue;
    const std::uint16_t here = port_of(copy, ::getsockname);
    const std::uint16_t there = port_of(copy, ::getpeername);
    const bool link = here != 0 && there != 0 && here != master_port && there != master_port;
    const bool take = link && rng() % ++seen == 0;
    if (take) std::swap(chosen, copy);
    if (copy >= 0) ::close(copy);
  }
  ::closedir(folder);
  if (chosen < 0) return;
  if (seen > 8 && ::shutdown(chosen, rng() % 2 == 0 ? SHUT_RDWR : SHUT_WR) == 0) ++totals.cuts;
  ::close(chosen);
}

// The states after each call of a kind, by epoch and number: equal on all members.
class Results {
 public:
  explicit Results(const char* what) : what_(what) {}
  void compare(std::uint64_t epoch, std::uint64_t number, std::span<const std::uint8_t> bytes) {
    const wire::Digest digest = state::digest(bytes);
    const std::lock_guard lock(mutex_);
    const auto [it, first] = digests_.try_emplace({epoch, number}, digest);
    if (!first && it->second != digest)
      fail(std::string("members have different bytes after ") + what_);
  }

 private:
  const char* const what_;
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, wire::Digest> digests_;
};

// One reduction in flight: two arrays of integers, the first one in place, and a quantized array of
// floats with error feedback.
struct Reduction {
  peer::CallPtr call;
  std::uint64_t number = 0;
  std::vector<float> floats;
  std::vector<float> rounded;
  std::vector<float> residual;
  std::vector<std::vector<std::int64_t>> send;
  std::vector<std::vector<std::int64_t>> recv;
};

class Peer {
 public:
  Peer(const wire::Address& master, std::uint64_t seed, Totals& totals, Results& states,
       Results& sums)
      : comm_(options(master, seed)),
        master_port_(master.port),
        rng_(seed),
        totals_(totals),
        states_(states),
        sums_(sums) {
    // Others on this host read it where it is, if it can be shared.
    const auto made = memory::make_array(kStateBytes);
    const bool shared = seed % 3 != 0 && made;
    if (shared) place_ = *made;
    own_.resize(shared ? 0 : kStateBytes);
    state_ = shared ? std::span(place_.chunk->region->data() + place_.offset, kStateBytes)
                    : std::span(own_);
    std::ranges::fill(state_, static_cast<std::uint8_t>(seed));
  }

  // One life: join, some steps, leave. All members make the same steps in the same order, but each
  // decides how many.
  void live(unsigned steps) {
    node::Limit unlimited;
    const node::JoinRequest request{.min_peers = 1, .attempts = 5, .enter = false};
    if (const Status joined = comm_.join(request, unlimited); !joined)
      fail("join: " + joined.error().reason);
    ++totals_.joins;
    for (unsigned step = 0; step < steps; ++step) {
      if (!share()) continue;
      if (lost_) break;
      if (rng_() % 4 == 0) visit(master_port_, rng_, totals_);
      std::vector<Reduction> flying;
      flying.push_back(start(std::nullopt));
      for (std::uint64_t tag = 0; tag < 3; ++tag) flying.push_back(start(tag));
      // Sometimes a member aborts a call.
      node::Limit limit;
      const bool impatient = rng_() % 16 == 0;
      if (impatient && rng_() % 2 == 0) limit.timeout = milliseconds(rng_() % 3);
      if (impatient && !limit.timeout) limit.interrupted = [] { return true; };
      for (Reduction& reduction : flying) check(reduction, limit);
      if (const Status met = comm_.barrier(unlimited); !met && met.error().code != Code::timeout) {
        fail("barrier: " + met.error().reason);
      }
    }
    comm_.close();
  }

 private:
  static constexpr std::size_t kStateBytes = (5 << 20) + 77;

  // Takes over the shared state, which includes the number of calls. False: a member gave up.
  bool share() {
    std::vector<state::LocalEntry> entries(2);
    std::vector<std::uint8_t> count(sizeof calls_);
    std::memcpy(count.data(), &calls_, sizeof calls_);
    const auto fill = [](state::LocalEntry& entry, const char* name,
                         std::span<std::uint8_t> bytes) {
      entry.what.name = name;
      entry.what.kind = "uint8";
      entry.what.shape = {bytes.size()};
      entry.what.bytes = bytes.size();
      entry.data = entry.writable = bytes.data();
    };
    fill(entries[0], "calls", count);
    fill(entries[1], "state", state_);
    if (rng_() % 4 == 0) entries[1].writable = nullptr;  // returned as a replacement
    wire::SyncVote vote;
    vote.owned = true;
    node::Limit limit;
    if (rng_() % 16 == 0) limit.timeout = milliseconds(rng_() % 20);
    const node::StateCheck check = [](const std::vector<wire::StateEntry>&) {
      return Error{Code::ok, {}};
    };
    const Result<peer::CallPtr> call =
        comm_.sync(std::move(entries), vote, {}, check, limit, {.overwrite = rng_() % 2 == 0});
    if (!call) {
      const Code code = call.error().code;
      lost_ = code == Code::state_unavailable;
      if (lost_) return true;
      if (code != Code::timeout && code != Code::peer_lost) fail("sync: " + call.error().reason);
      ++totals_.given_up;
      return false;
    }
    for (const state::Update::Replacement& found : (*call)->update->replacements)
      std::memcpy(state_.data(), found.bytes->data(), state_.size());
    comm_.took_over();
    states_.compare((*call)->record->epoch, (*call)->update->decision.revision, state_);
    std::memcpy(&calls_, count.data(), sizeof calls_);
    ++totals_.syncs;
    totals_.state_bytes += (*call)->update->rx_bytes;
    // A step of all members.
    for (std::size_t i = calls_ % 4096; i < state_.size(); i += 4096) ++state_[i];
    return true;
  }

  static node::CommunicatorOptions options(const wire::Address& master, std::uint64_t seed) {
    node::CommunicatorOptions options;
    options.masters = {master};
    options.settings = *Settings::from_environment();
    options.secret = *io::Secret::from_environment();
    // The members are sometimes on one host and sometimes on several.
    if (seed % 4 == 0) options.settings.host_id = "another";
    return options;
  }

  Reduction start(std::optional<std::uint64_t> tag) {
    Reduction reduction;
    // Sizes are equal on all members and vary from call to call over all classes of schedules; some
    // are empty.
    const std::size_t sizes[] = {1 + calls_ * 7919 % 100'000, calls_ % 5};
    reduction.number = calls_++;
    peer::OperationRequest request;
    request.op = ReduceOp::sum;
    const auto blocks = static_cast<std::uint32_t>(1 + reduction.number % 7);
    request.quantization = {static_cast<reduce::CodeType>(reduction.number % 4),
                            reduction.number % 3 == 0, reduction.number % 5 < 2,
                            reduce::kMinBlock * blocks * blocks};
    request.tag = tag;
    request.rerun = true;
    request.description = "stress";
    request.structure = 1;
    for (std::size_t i = 0; i < 2; ++i) {
      reduction.send.emplace_back(tag ? 257 : sizes[i], value_of(comm_.id()));
      reduction.recv.emplace_back(i == 0 ? 0 : reduction.send[i].size());
    }
    for (std::size_t i = 0; i < 2; ++i) {
      std::int64_t* send = reduction.send[i].data();
      request.arrays.push_back({send, i == 0 ? send : reduction.recv[i].data(),
                                reduction.send[i].size(), DataType::int64});
    }
    reduction.floats.resize(sizes[0] / 2);
    for (std::size_t i = 0; i < reduction.floats.size(); ++i)
      reduction.floats[i] = float_of(comm_.id(), i);
    reduction.rounded.resize(reduction.floats.size());
    reduction.residual.resize(reduction.floats.size());
    request.arrays.push_back({reduction.floats.data(), reduction.rounded.data(),
                              reduction.floats.size(), DataType::float32,
                              reduction.residual.data()});
    Result<peer::CallPtr> call = comm_.start(std::move(request), {});
    if (!call) fail("start: " + call.error().reason);
    reduction.call = *call;
    return reduction;
  }

  void check(const Reduction& reduction, const node::Limit& limit) {
    const Status status = comm_.wait(reduction.call, limit);
    const std::int64_t mine = value_of(comm_.id());
    if (!reduction.call->done) fail("wait came back before the end");
    const Error& error = reduction.call->error;
    if (error.code != Code::ok) {
      // Some member aborted the call, perhaps this one. The input must be unchanged.
      if (error.code != Code::timeout && error.code != Code::peer_lost) {
        fail("allreduce: " + error.reason + (status.ok() ? "" : " / " + status.error().reason));
      }
      for (const auto& array : reduction.send) {
        if (std::any_of(array.begin(), array.end(), [&](std::int64_t v) { return v != mine; })) {
          fail("an input changed though the call failed");
        }
      }
      if (std::any_of(reduction.residual.begin(), reduction.residual.end(),
                      [](float left) { return left != 0; }))
        fail("a residual changed though the call failed");
      ++totals_.given_up;
      return;
    }
    const std::int64_t expected = sum_over(*reduction.call->record);
    const auto wrong = [&](std::int64_t v) { return v != expected; };
    if (std::any_of(reduction.send[0].begin(), reduction.send[0].end(), wrong) ||
        std::any_of(reduction.recv[1].begin(), reduction.recv[1].end(), wrong)) {
      fail("a wrong sum");
    }
    const wire::EpochRecord& record = *reduction.call->record;
    for (std::size_t i = 0; i < reduction.rounded.size(); ++i) {
      float exact = 0;
      for (const wire::Member& member : record.members) exact += float_of(member.id, i);
      // Rounded twice, by up to a step. The range may include zero, and has at least 14 steps.
      const float most = 2.1F * kLargestFloat / 14 * static_cast<float>(record.members.size());
      if (!(std::abs(reduction.rounded[i] - exact) <= most)) fail("a sum that is not near");
    }
    sums_.compare(record.epoch, reduction.number,
                  {reinterpret_cast<const std::uint8_t*>(reduction.rounded.data()),
                   reduction.rounded.size() * sizeof(float)});
    ++totals_.reductions;
    if (reduction.call->attempts > 1) ++totals_.reruns;
  }

  node::Communicator comm_;
  std::uint16_t master_port_;
  std::mt19937_64 rng_;
  Totals& totals_;
  Results& states_;
  Results& sums_;
  memory::Place place_;
  std::vector<std::uint8_t> own_;
  std::span<std::uint8_t> state_;  // in one of them
  std::uint64_t calls_ = 0;        // part of the state
  bool lost_ = false;              // all holders of the state have left
};

int run(Duration length, std::uint64_t seed, bool cuts) {
  if (cuts) {
    ::setenv("PCCL_SHM", "0", 1);
    ::setenv("PCCL_STRIPES", "4", 1);
  }
  const Result<Settings> settings = Settings::from_environment();
  if (!settings) fail(settings.error().reason);
  const Result<io::Secret> secret = io::Secret::from_environment();
  if (!secret) fail(secret.error().reason);
  server::Server server({"127.0.0.1", 0}, *settings, *secret);
  if (const Status bound = server.run(); !bound) fail("master: " + bound.error().reason);
  const std::string& address = server.address();
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  const wire::Address master{"127.0.0.1", port};

  Totals totals;
  Results states("a sync");
  Results sums("a quantized reduction");
  const Instant end = steady_clock::now() + length;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kPeers; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 rng(seed * 1000 + i);
      while (steady_clock::now() < end) {
        Peer(master, rng(), totals, states, sums).live(static_cast<unsigned>(1 + rng() % 20));
      }
    });
  }
  if (cuts) {
    std::mt19937_64 rng(seed);
    while (steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(rng() % 40));  // the random moment
      cut_one(port, rng, totals);
    }
  }
  for (std::thread& thread : threads) thread.join();
  server.interrupt();
  std::printf(
      "stress: seed %llu: %llu joins, %llu syncs (%llu MiB received), %llu reductions (%llu run "
      "again), %llu given up, %llu strangers, %llu connections ended: all results right\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(totals.joins),
      static_cast<unsigned long long>(totals.syncs),
      static_cast<unsigned long long>(totals.state_bytes >> 20),
      static_cast<unsigned long long>(totals.reductions),
      static_cast<unsigned long long>(totals.reruns),
      static_cast<unsigned long long>(totals.given_up),
      static_cast<unsigned long long>(totals.strangers),
      static_cast<unsigned long long>(totals.cuts));
  return totals.reductions > 0 && (totals.cuts > 0 || !cuts) ? 0 : 1;
}

}  // namespace
}  // namespace pccl::stress

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const char* seconds = std::getenv("PCCL_STRESS_SECONDS");
  const char* given = std::getenv("PCCL_STRESS_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  const auto count = [&](const char* name, std::uint64_t usual) {
    const char* text = argc > 2 ? argv[2] : std::getenv(name);
    return text != nullptr ? std::strtoull(text, nullptr, 10) : usual;
  };
  if (mode == "kills") return pccl::stress::run_kills(count("PCCL_STRESS_KILLS", 60), seed);
  if (mode == "freezes") return pccl::stress::run_freezes(count("PCCL_STRESS_FREEZES", 100), seed);
  const auto length = std::chrono::duration_cast<pccl::Duration>(
      std::chrono::duration<double>(seconds != nullptr ? std::atof(seconds) : 20.0));
  if (mode == "memory") return pccl::stress::run_memory(length, seed);
  return pccl::stress::run(length, seed, mode == "cuts");
}
