#include "tests/stress/worker.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "pccl/memory/arrays.h"
#include "pccl/node/communicator.h"
#include "pccl/state/manifest.h"
#include "pccl/topology/plan.h"

namespace pccl::stress {
namespace {

using std::chrono::steady_clock;

constexpr std::size_t kKept = 4;  // latest operations whose arrays are checked after a freeze

struct Failure {
  std::string what;
};

// A peer's contribution, which follows from its id. Element i is value * (salt + i).
std::uint32_t value_of(const PeerId& id) {
  std::uint32_t value = 0;
  std::memcpy(&value, id.bytes.data(), sizeof value);
  return value;
}

// The arguments of the operation with this key, equal on all members.
struct Shape {
  Size size = Size::tiny;
  std::size_t count = 0;
  std::uint32_t salt = 0;
  bool rerun = true;
  unsigned memory = 0;    // 0: private, 1, 2: shared, 3: each member chooses
  unsigned in_place = 0;  // 0, 1: no, 2: yes, 3: each member chooses
};

Shape shape_of(std::uint64_t seed, const Key& key) {
  std::seed_seq mixed{seed, seed >> 32, key.admission, key.sequence};
  std::mt19937_64 rng(mixed);
  Shape shape;
  const std::uint64_t kind = rng() % 8;
  if (kind < 3) {
    shape.count = rng() % 2 == 0 ? 1 : 1 + rng() % 1024;
  } else if (kind < 6) {
    shape.size = Size::medium;
    shape.count = (16 << 10) + rng() % (240 << 10);
  } else {
    shape.size = Size::large;
    shape.count = (512 << 10) + rng() % (512 << 10);
  }
  shape.salt = static_cast<std::uint32_t>(rng());
  shape.rerun = rng() % 3 != 0;
  shape.memory = rng() % 4;
  shape.in_place = rng() % 4;
  return shape;
}

struct Array {
  std::vector<std::uint32_t> own;
  memory::Place place;
  std::uint32_t* data = nullptr;
  std::size_t room = 0;
};

struct Arrays {
  Array send;
  Array recv;  // without data: in place
  std::size_t count = 0;
  wire::Digest sent;  // digest of `send` after the operation
  wire::Digest received;
};

wire::Digest digest(const Array& array, std::size_t count) {
  return state::digest({reinterpret_cast<const std::uint8_t*>(array.data), count * 4});
}

class Worker {
 public:
  Worker(const WorkerOptions& options, const Orders& orders, Slot& slot)
      : options_(options), orders_(orders), slot_(slot), rng_(options.seed) {}

  void run() {
    while (!orders_.stop) live();
  }

 private:
  // One membership, from joining to leaving or eviction.
  void live() {
    node::CommunicatorOptions options;
    options.masters = {options_.master};
    options.group = options_.group;
    options.settings = options_.settings;
    node::Communicator comm(options);
    slot_.self = comm.id();
    slot_.world = 0;
    key_ = {};
    const node::JoinRequest request{.min_peers = 1, .attempts = 5, .enter = false};
    if (const Status joined = comm.join(request, {}); !joined)
      return ended(comm, joined.error(), "join");
    while (!orders_.stop) {
      look_at_kept();
      const Result<bool> admitted = comm.admit({});
      if (!admitted) return ended(comm, admitted.error(), "admit");
      if (*admitted) key_ = {comm.view()->record->admission, 0};
      for (int i = 0; i < 4; ++i) {
        if (!reduce(comm)) return;
      }
    }
    comm.close();
  }

  bool reduce(node::Communicator& comm) {
    const peer::Record world = comm.view()->record;
    const Shape shape = shape_of(options_.run_seed, key_);
    const bool in_place = shape.in_place == 3 ? rng_() % 2 == 0 : shape.in_place == 2;
    Arrays arrays;
    arrays.count = shape.count;
    arrays.send = take(shape);
    if (!in_place) arrays.recv = take(shape);
    const std::uint32_t mine = value_of(comm.id());
    for (std::size_t i = 0; i < shape.count; ++i)
      arrays.send.data[i] = mine * (shape.salt + static_cast<std::uint32_t>(i));
    const Array& result = in_place ? arrays.send : arrays.recv;

    peer::OperationRequest request;
    request.arrays.push_back({arrays.send.data, result.data, shape.count, DataType::uint32});
    request.op = ReduceOp::sum;
    request.rerun = shape.rerun;
    request.description = "kills";
    request.structure = 1;
    peer::CallPtr call;
    slot_.world = topology::on_one_host(world->plan) ? world->members.size() : 0;
    slot_.size = shape.size;
    slot_.key = key_;
    slot_.stage = Stage::reducing;
    obey(shape.size);
    const Instant start = steady_clock::now();
    const Status status =
        comm.reduce(std::move(request), {}, [&](const peer::CallPtr& made) { call = made; });
    const Duration taken = steady_clock::now() - start;
    slot_.stage = Stage::checking;

    Event event;
    event.self = comm.id();
    event.key = key_;
    if (call != nullptr) {
      const auto& key = std::get<wire::OpKey>(call->key);
      if (key.admission != key_.admission || key.sequence != key_.sequence)
        throw Failure{"not the operation that was meant: " + wire::describe(key)};
      if (!call->done) throw Failure{"reduce came back before the end"};
    }
    if (status) {
      std::uint32_t sum = 0;
      for (const wire::Member& member : call->record->members) {
        sum += value_of(member.id);
        event.members.at(event.world++) = member.id;
      }
      check(result, shape, sum, "the result");
      if (!in_place) check(arrays.send, shape, mine, "the input of a committed operation");
      event.epoch = call->record->epoch;
      event.attempts = call->attempts;
      // Over the network all elements are sent twice: as contributions and as results.
      event.counted = call->attempts == 1 && event.world > 1 && shape.size != Size::tiny;
      event.in_memory =
          call->traffic.tx_bytes * event.world * 2 < 3 * 4 * shape.count * (event.world - 1);
      event.digest = digest(result, shape.count);
      if (call->attempts == 1) took_.at(static_cast<std::size_t>(shape.size)) = taken;
      say(event);
    } else {
      check(arrays.send, shape, mine, "the input of a failed operation");
      event.kind = Event::Kind::failed;
      if (status.error().code != Code::peer_lost) {
        ended(comm, status.error(), "allreduce");
        return false;
      }
      if (shape.rerun) throw Failure{"an operation ended by a loss: " + status.error().reason};
      say(event);
    }
    keep(std::move(arrays));
    ++key_.sequence;
    slot_.stage = Stage::elsewhere;
    return true;
  }

  void check(const Array& array, const Shape& shape, std::uint32_t value, const char* what) const {
    for (std::size_t i = 0; i < shape.count; ++i) {
      const std::uint32_t expected = value * (shape.salt + static_cast<std::uint32_t>(i));
      if (array.data[i] == expected) continue;
      throw Failure{std::string(what) + " is wrong at element " + std::to_string(i) + " of " +
                    std::to_string(shape.count) + ": " + std::to_string(array.data[i]) +
                    " instead of " + std::to_string(expected)};
    }
  }

  // Reports the end of the membership. Another communicator joins next.
  void ended(const node::Communicator& comm, const Error& error, const char* where) {
    if (error.code != Code::evicted && error.code != Code::master_lost &&
        error.code != Code::unreachable) {
      throw Failure{std::string(where) + ": " + error.reason};
    }
    Event event;
    event.kind = Event::Kind::out;
    event.self = comm.id();
    event.key = key_;
    slot_.stage = Stage::elsewhere;
    say(event);
  }

  void say(const Event& event) {
    const std::uint64_t number = slot_.written;
    while (number - slot_.read >= kEvents) std::this_thread::yield();
    slot_.events.at(number % kEvents) = event;
    slot_.written = number + 1;
  }

  // Arms a timer for an ordered signal: the kernel sends it whatever the process is doing.
  void obey(Size size) {
    const std::uint64_t order = slot_.order;
    if (order == slot_.armed || size != slot_.order_size) return;
    slot_.armed = order;
    const Duration after =
        Duration(1) + took_.at(static_cast<std::size_t>(size)) * static_cast<int>(slot_.at) / 1000;
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = slot_.signal;
    timer_t timer{};
    if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) throw Failure{"no timer"};
    itimerspec once{};
    once.it_value.tv_sec = static_cast<time_t>(after / std::chrono::seconds(1));
    once.it_value.tv_nsec = static_cast<long>((after % std::chrono::seconds(1)).count());
    (void)::timer_settime(timer, 0, &once, nullptr);
  }

  // -- memory

  Array take(const Shape& shape) {
    const bool shared = shape.memory == 3 ? rng_() % 2 == 0 : shape.memory > 0;
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->room < shape.count || (it->place.chunk != nullptr) != shared) continue;
      Array array = std::move(*it);
      free_.erase(it);
      return array;
    }
    Array array;
    array.room = shape.count;
    if (!shared) {
      array.own.resize(shape.count);
      array.data = array.own.data();
      return array;
    }
    Result<memory::Place> made = memory::make_array(shape.count * 4);
    if (!made) throw Failure{made.error().reason};
    array.place = *made;
    array.data = reinterpret_cast<std::uint32_t*>(made->chunk->region->data() + made->offset);
    return array;
  }

  void give(Array array) {
    if (array.data == nullptr) return;
    free_.push_back(std::move(array));
    if (free_.size() > 8) free_.pop_front();
  }

  // While a worker is frozen, keep the latest arrays and the first new ones unchanged.
  void keep(Arrays arrays) {
    const bool frozen = orders_.frozen != slot_.verified;
    if (!frozen || kept_.size() < 2 * kKept) {
      arrays.sent = digest(arrays.send, arrays.count);
      if (arrays.recv.data != nullptr) arrays.received = digest(arrays.recv, arrays.count);
      kept_.push_back(std::move(arrays));
    } else {
      give(std::move(arrays.send));
      give(std::move(arrays.recv));
    }
    while (!frozen && kept_.size() > kKept) drop_kept();
  }

  void drop_kept() {
    give(std::move(kept_.front().send));
    give(std::move(kept_.front().recv));
    kept_.pop_front();
  }

  void look_at_kept() {
    const std::uint64_t reported = orders_.reported;
    if (reported == slot_.verified) return;
    for (const Arrays& arrays : kept_) {
      if (digest(arrays.send, arrays.count) != arrays.sent ||
          (arrays.recv.data != nullptr && digest(arrays.recv, arrays.count) != arrays.received)) {
        throw Failure{"bytes changed after a frozen member woke up"};
      }
    }
    slot_.verified = reported;
  }

  const WorkerOptions& options_;
  const Orders& orders_;
  Slot& slot_;
  std::mt19937_64 rng_;
  Key key_;
  std::array<Duration, kSizes> took_{};  // by size, the latest
  std::deque<Array> free_;
  std::deque<Arrays> kept_;
};

}  // namespace

int run_worker(const WorkerOptions& options, const Orders& orders, Slot& slot) {
  try {
    Worker(options, orders, slot).run();
  } catch (const Failure& failure) {
    std::snprintf(slot.failure.data(), slot.failure.size(), "%s", failure.what.c_str());
    return 1;
  }
  return 0;
}

}  // namespace pccl::stress
