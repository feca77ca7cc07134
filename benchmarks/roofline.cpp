// The bound that memory sets: the passes over memory of an all-reduce between processes of one
// host, without protocol, commit or Python. Also measures plain memcpy and a[i] += b[i], by one
// process and by all.
//
//   roofline WORLD BYTES...   measures each size and prints a line of JSON for each
//   roofline WORLD            takes orders from standard input, one line of JSON as answer to each:
//     prepare BYTES     new processes with arrays of that size; checks every kind; chooses the
//                       block sizes
//     run KIND CALLS    every rank's seconds per call, and its CPU seconds inside the calls
//
// Kinds of all-reduce, float32 sum, as pccl may do it without giving up its guarantees (every
// process writes only memory of its own):
//   staged    private arrays: block by block, each rank copies what others need into its shared
//             staging block, reduces its own share from the others' staging blocks and its private
//             array into a shared result block, and copies the others' results to its private
//             output; double buffered
//   gather    shared arrays, out of place: each rank reduces its share straight from the others'
//             arrays into its own output, and copies the other shares from the others' outputs
//   scratch   shared arrays, in place: each rank reduces its share into its scratch; when all have,
//             copies all shares over its array
// and each with agreement around it:
//   agreed-staged, agreed-gather, agreed-scratch    the same, but all meet before their passes, as
//             if to compare what they were called with, and after them, as if for one verdict
// and of plain memory traffic, on private arrays: copy, add by all processes; copy1, add1 by one.
//
// Before each call every rank rewrites its whole array; then all meet, and each takes its time from
// there.

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int kMaxWorld = 16;
constexpr int kMaxCalls = 20000;
constexpr int kTrialCalls = 3;  // when block sizes are compared
constexpr int kSpins = 100;     // a few microseconds, when there is a core for each
constexpr std::size_t kLine = 64;
constexpr std::size_t kAlign = kLine / sizeof(float);  // elements; shares begin at cache lines
constexpr std::size_t kHugePagesFrom = std::size_t{4} << 20;  // as NumPy does
constexpr std::array<std::size_t, 7> kBlockBytes = {64 << 10,   128 << 10,  256 << 10, 512 << 10,
                                                    1024 << 10, 2048 << 10, 4096 << 10};

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::_Exit(1);
}

double seconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// ---- memory -------------------------------------------------------------------------------------

void* map(std::size_t bytes, int kind) {
  void* memory =
      mmap(nullptr, std::max(bytes, kLine), PROT_READ | PROT_WRITE, MAP_ANONYMOUS | kind, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  if (bytes >= kHugePagesFrom) madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

float* map_floats(std::size_t count, int kind) {
  return static_cast<float*>(map(count * sizeof(float), kind));
}

// ---- meeting ------------------------------------------------------------------------------------

class Barrier {
 public:
  // Tries `spins` times between two yields of the core.
  void wait(unsigned world, int spins) {
    const std::uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == world) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int tries = 0; phase_.load(std::memory_order_acquire) == phase; ++tries) {
      if (tries == spins) {
        sched_yield();
        tries = -1;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

 private:
  alignas(kLine) std::atomic<std::uint32_t> arrived_{0};
  alignas(kLine) std::atomic<std::uint32_t> phase_{0};
};

// ---- sums ---------------------------------------------------------------------------------------

// to[i] = also[i] = the sum of all from[.][i]; `also` may be null.
template <int kCount, bool kTwice>
void sum_fixed(float* __restrict to, float* __restrict also,
               const std::array<const float*, kMaxWorld>& from, std::size_t count) {
  std::array<const float*, kCount> in{};
  for (int i = 0; i < kCount; ++i) in[i] = from[i];
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) {
    float total = in[0][i];
    for (int j = 1; j < kCount; ++j) total += in[j][i];
    to[i] = total;
    if constexpr (kTwice) also[i] = total;
  }
}

template <bool kTwice>
void sum_any(float* to, float* also, const std::array<const float*, kMaxWorld>& from, int world,
             std::size_t count) {
  constexpr std::size_t kPiece = 1024;  // stays in the innermost cache
  for (std::size_t first = 0; first < count; first += kPiece) {
    const std::size_t piece = std::min(kPiece, count - first);
    std::array<const float*, kMaxWorld> in{};
    in[0] = from[0] + first;
    in[1] = from[1] + first;
    sum_fixed<2, false>(to + first, nullptr, in, piece);
    for (int j = 2; j < world; ++j) {
      for (std::size_t i = 0; i < piece; ++i) to[first + i] += from[j][first + i];
    }
    if constexpr (kTwice) std::memcpy(also + first, to + first, piece * sizeof(float));
  }
}

void sum(float* to, float* also, const std::array<const float*, kMaxWorld>& from, int world,
         std::size_t count) {
  if (world == 2) {
    also ? sum_fixed<2, true>(to, also, from, count) : sum_fixed<2, false>(to, also, from, count);
  } else if (world == 3) {
    also ? sum_fixed<3, true>(to, also, from, count) : sum_fixed<3, false>(to, also, from, count);
  } else if (world == 4) {
    also ? sum_fixed<4, true>(to, also, from, count) : sum_fixed<4, false>(to, also, from, count);
  } else {
    also ? sum_any<true>(to, also, from, world, count)
         : sum_any<false>(to, also, from, world, count);
  }
}

// ---- one size -----------------------------------------------------------------------------------

enum class Kind { staged, gather, scratch, copy, add, check };
enum class Fill { noise, constant };

struct Order {
  Kind kind = Kind::check;
  Fill fill = Fill::constant;
  int calls = 0;
  bool alone = false;     // only rank 0 works
  bool agreed = false;    // all meet before and after, which counts
  std::size_t block = 0;  // elements
};

// Shared by all processes of one size.
struct Shared {
  Barrier barrier;
  std::atomic<bool> wrong{false};
  alignas(kLine) std::array<double, kMaxWorld> cpu{};
  std::array<std::array<double, kMaxCalls>, kMaxWorld> seconds{};
};

struct Share {
  std::size_t first = 0, count = 0;  // elements
};

Share share_of(std::size_t count, int rank, int world) {
  std::size_t each =
      (count + static_cast<std::size_t>(world) - 1) / static_cast<std::size_t>(world);
  each = (each + kAlign - 1) / kAlign * kAlign;
  const std::size_t first = std::min(count, each * static_cast<std::size_t>(rank));
  return {first, std::min(each, count - first)};
}

float noise(int rank, std::size_t i) {  // whole numbers: sums are exact
  return static_cast<float>(static_cast<int>((i * 2654435761U >> 7) % 17) - 8 * (rank % 3));
}

float constant(int rank, int call) { return static_cast<float>(rank + 1 + call % 100); }

// The processes and arrays of one size. The maker is rank 0; the others live until it goes.
class Team {
 public:
  Team(int world, std::size_t bytes)
      : world_(world),
        count_(bytes / sizeof(float)),
        spins_(world <= static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) ? kSpins : 0) {
    shared_ = new (map(sizeof(Shared), MAP_SHARED)) Shared;
    for (int rank = 0; rank < world; ++rank) {
      in_[rank] = map_floats(count_, MAP_SHARED);
      out_[rank] = map_floats(count_, MAP_SHARED);
      scratch_[rank] = map_floats(share_of(count_, 0, world).count, MAP_SHARED);
      for (int half = 0; half < 2; ++half) {
        staging_[half][rank] = map_floats(kBlockBytes.back() / sizeof(float), MAP_SHARED);
        result_[half][rank] = map_floats(kBlockBytes.back() / sizeof(float), MAP_SHARED);
      }
    }
    std::fflush(stdout);
    for (int rank = 1; rank < world; ++rank) {
      std::array<int, 2> pipe_ends{};
      if (pipe(pipe_ends.data()) != 0) fail("pipe");
      const pid_t maker = getpid();
      const pid_t child = fork();
      if (child < 0) fail("fork");
      if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != maker) std::_Exit(1);
        for (int end : orders_) close(end);
        close(pipe_ends[1]);
        serve(rank, pipe_ends[0]);
      }
      close(pipe_ends[0]);
      orders_.push_back(pipe_ends[1]);
      children_.push_back(child);
    }
    make_private();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  ~Team() {
    for (int end : orders_) close(end);
    for (pid_t child : children_) waitpid(child, nullptr, 0);
    munmap(shared_, sizeof(Shared));
    const std::size_t bytes = std::max(count_ * sizeof(float), kLine);
    for (int rank = 0; rank < world_; ++rank) {
      munmap(in_[rank], bytes);
      munmap(out_[rank], bytes);
      munmap(scratch_[rank], std::max(share_of(count_, 0, world_).count * sizeof(float), kLine));
      for (int half = 0; half < 2; ++half) {
        munmap(staging_[half][rank], kBlockBytes.back());
        munmap(result_[half][rank], kBlockBytes.back());
      }
    }
    munmap(private_in_, bytes);
    munmap(private_out_, bytes);
  }

  // Every rank carries it out. Wrong sums end the program.
  void run(const Order& order) {
    if (!order.alone) {
      for (int end : orders_) {
        if (write(end, &order, sizeof order) != sizeof order) fail("write");
      }
    }
    obey(0, order);
    if (!order.alone) meet();  // all have left their numbers
    if (shared_->wrong.load()) {
      std::fprintf(stderr, "roofline: wrong sum\n");
      std::_Exit(1);
    }
  }

  // The slowest rank's median of the last order.
  [[nodiscard]] double median(const Order& order) const {
    double slowest = 0;
    for (int rank = 0; rank < (order.alone ? 1 : world_); ++rank) {
      std::vector<double> times(shared_->seconds[rank].begin(),
                                shared_->seconds[rank].begin() + order.calls);
      std::nth_element(times.begin(), times.begin() + order.calls / 2, times.end());
      slowest = std::max(slowest, times[static_cast<std::size_t>(order.calls) / 2]);
    }
    return slowest;
  }

  [[nodiscard]] const Shared& shared() const { return *shared_; }
  [[nodiscard]] std::size_t count() const { return count_; }

 private:
  void make_private() {
    private_in_ = map_floats(count_, MAP_PRIVATE);
    private_out_ = map_floats(count_, MAP_PRIVATE);
    std::fill_n(private_in_, count_, 0.0F);
    std::fill_n(private_out_, count_, 0.0F);
  }

  [[noreturn]] void serve(int rank, int orders) {
    make_private();
    Order order;
    while (read(orders, &order, sizeof order) == sizeof order) {
      obey(rank, order);
      meet();
    }
    std::_Exit(0);
  }

  void meet() { shared_->barrier.wait(static_cast<unsigned>(world_), spins_); }

  void obey(int rank, const Order& order) {
    const bool own_memory = order.kind != Kind::gather && order.kind != Kind::scratch;
    float* in = own_memory ? private_in_ : in_[rank];
    double used = 0;
    for (int call = -1; call < order.calls; ++call) {  // the first is not counted
      const int number = std::max(call, 0);
      if (order.fill == Fill::noise) {
        for (std::size_t i = 0; i < count_; ++i) in[i] = noise(rank, i);
      } else {
        std::fill_n(in, count_, constant(rank, number));
      }
      if (!order.alone) meet();
      const double cpu_before = cpu_seconds();
      const auto began = std::chrono::steady_clock::now();
      if (order.agreed) meet();
      act(rank, order);
      if (order.agreed) meet();
      const double seconds = seconds_since(began);
      if (call >= 0) {
        used += cpu_seconds() - cpu_before;
        shared_->seconds[rank][static_cast<std::size_t>(call)] = seconds;
      }
      if (!order.alone) meet();  // nobody rewrites what others still read
    }
    shared_->cpu[rank] = used;
    check(rank, order);
  }

  void act(int rank, const Order& order) {
    switch (order.kind) {
      case Kind::staged:
        return staged(rank, order.block);
      case Kind::gather:
        return gather(rank, order.block);
      case Kind::scratch:
        return scratch(rank);
      case Kind::copy:
        std::memcpy(private_out_, private_in_, count_ * sizeof(float));
        return;
      case Kind::add: {
        float* __restrict to = private_out_;
        const float* __restrict from = private_in_;
        for (std::size_t i = 0; i < count_; ++i) to[i] += from[i];
        return;
      }
      case Kind::check:
        return;
    }
  }

  void staged(int rank, std::size_t block) {
    const std::size_t blocks = (count_ + block - 1) / block;
    stage(rank, 0, block);
    meet();
    for (std::size_t k = 0; k < blocks; ++k) {
      const std::size_t first = k * block;
      const std::size_t size = std::min(block, count_ - first);
      const Share own = share_of(size, rank, world_);
      std::array<const float*, kMaxWorld> from{};
      for (int other = 0; other < world_; ++other) {
        from[other] =
            other == rank ? private_in_ + first + own.first : staging_[k % 2][other] + own.first;
      }
      sum(result_[k % 2][rank] + own.first, private_out_ + first + own.first, from, world_,
          own.count);
      if (k + 1 < blocks) stage(rank, k + 1, block);
      meet();
      for (int step = 1; step < world_; ++step) {
        const int other = (rank + step) % world_;
        const Share theirs = share_of(size, other, world_);
        std::memcpy(private_out_ + first + theirs.first, result_[k % 2][other] + theirs.first,
                    theirs.count * sizeof(float));
      }
    }
  }

  // Copies what the others need of block k to where they read it.
  void stage(int rank, std::size_t k, std::size_t block) {
    const std::size_t first = k * block;
    const std::size_t size = std::min(block, count_ - first);
    const Share own = share_of(size, rank, world_);
    float* to = staging_[k % 2][rank];
    const float* from = private_in_ + first;
    std::memcpy(to, from, own.first * sizeof(float));
    const std::size_t after = own.first + own.count;
    std::memcpy(to + after, from + after, (size - after) * sizeof(float));
  }

  void gather(int rank, std::size_t block) {
    for (std::size_t first = 0; first < count_; first += block) {
      const std::size_t size = std::min(block, count_ - first);
      const Share own = share_of(size, rank, world_);
      reduce_shared(out_[rank] + first + own.first, first + own.first, own.count);
      meet();
      for (int step = 1; step < world_; ++step) {
        const int other = (rank + step) % world_;
        const Share theirs = share_of(size, other, world_);
        std::memcpy(out_[rank] + first + theirs.first, out_[other] + first + theirs.first,
                    theirs.count * sizeof(float));
      }
    }
  }

  void scratch(int rank) {
    const Share own = share_of(count_, rank, world_);
    reduce_shared(scratch_[rank], own.first, own.count);
    meet();
    for (int step = 0; step < world_; ++step) {
      const int other = (rank + step) % world_;
      const Share theirs = share_of(count_, other, world_);
      std::memcpy(in_[rank] + theirs.first, scratch_[other], theirs.count * sizeof(float));
    }
  }

  void reduce_shared(float* to, std::size_t first, std::size_t count) {
    std::array<const float*, kMaxWorld> from{};
    for (int other = 0; other < world_; ++other) from[other] = in_[other] + first;
    sum(to, nullptr, from, world_, count);
  }

  void check(int rank, const Order& order) {
    const float* result = order.kind == Kind::staged    ? private_out_
                          : order.kind == Kind::gather  ? out_[rank]
                          : order.kind == Kind::scratch ? in_[rank]
                                                        : nullptr;
    if (result == nullptr) return;
    for (std::size_t i = 0; i < count_; ++i) {
      float expected = 0;
      for (int other = 0; other < world_; ++other) {
        expected += order.fill == Fill::noise ? noise(other, i)
                                              : constant(other, std::max(order.calls - 1, 0));
      }
      if (result[i] != expected) shared_->wrong.store(true);
    }
  }

  const int world_;
  const std::size_t count_;  // elements
  const int spins_;
  Shared* shared_ = nullptr;
  // Written by one rank, read by all.
  std::array<float*, kMaxWorld> in_{}, out_{}, scratch_{};
  std::array<std::array<float*, kMaxWorld>, 2> staging_{}, result_{};
  // This process's own.
  float* private_in_ = nullptr;
  float* private_out_ = nullptr;
  // Rank 0's.
  std::vector<int> orders_;
  std::vector<pid_t> children_;
};

// ---- orders -------------------------------------------------------------------------------------

struct Blocks {
  std::size_t staged = 0, gather = 0;  // elements
};

bool parse(std::string_view name, const Blocks& blocks, Order& order) {
  constexpr std::string_view kAgreed = "agreed-";
  order.agreed = name.starts_with(kAgreed);
  if (order.agreed) name.remove_prefix(kAgreed.size());
  order.alone = name.ends_with('1');
  if (order.alone) name.remove_suffix(1);
  if (name == "staged") {
    order.kind = Kind::staged;
    order.block = blocks.staged;
  } else if (name == "gather") {
    order.kind = Kind::gather;
    order.block = blocks.gather;
  } else if (name == "scratch") {
    order.kind = Kind::scratch;
  } else if (name == "copy") {
    order.kind = Kind::copy;
  } else if (name == "add") {
    order.kind = Kind::add;
  } else {
    return false;
  }
  const bool plain = order.kind == Kind::copy || order.kind == Kind::add;
  return plain ? !order.agreed : !order.alone;
}

// The block size that is fastest for this kind. A wrong sum of noise ends the program.
std::size_t best_block(Team& team, Kind kind, bool whole) {
  std::vector<std::size_t> candidates;
  for (std::size_t bytes : kBlockBytes) {
    candidates.push_back(bytes / sizeof(float));
    if (bytes >= team.count() * sizeof(float)) break;
  }
  if (whole && team.count() > candidates.back()) candidates.push_back(team.count());
  std::size_t best = 0;
  double least = 0;
  for (std::size_t block : candidates) {
    const Order order{.kind = kind, .calls = kTrialCalls, .block = block};
    team.run(order);
    const double seconds = team.median(order);
    if (best == 0 || seconds < least) {
      best = block;
      least = seconds;
    }
  }
  team.run({.kind = kind, .fill = Fill::noise, .calls = 0, .block = best});
  return best;
}

Blocks prepare(Team& team) {
  Blocks blocks;
  blocks.staged = best_block(team, Kind::staged, false);
  blocks.gather = best_block(team, Kind::gather, true);
  team.run({.kind = Kind::scratch, .fill = Fill::noise, .calls = 0});
  return blocks;
}

void answer_orders(int world) {
  Team* team = nullptr;
  Blocks blocks;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string what, kind;
    std::size_t bytes = 0;
    Order order;
    words >> what;
    if (what == "prepare" && words >> bytes && bytes >= sizeof(float)) {
      delete team;
      team = new Team(world, bytes);
      blocks = prepare(*team);
      std::printf("{\"staged_block_bytes\": %zu, \"gather_block_bytes\": %zu}\n",
                  blocks.staged * sizeof(float), blocks.gather * sizeof(float));
    } else if (what == "run" && team != nullptr && words >> kind >> order.calls &&
               order.calls > 0 && order.calls <= kMaxCalls && parse(kind, blocks, order)) {
      team->run(order);
      std::printf("[");
      for (int rank = 0; rank < (order.alone ? 1 : world); ++rank) {
        std::printf("%s{\"cpu\": %.9f, \"seconds\": [", rank ? ", " : "", team->shared().cpu[rank]);
        for (int call = 0; call < order.calls; ++call) {
          std::printf("%s%.9f", call ? ", " : "",
                      team->shared().seconds[rank][static_cast<std::size_t>(call)]);
        }
        std::printf("]}");
      }
      std::printf("]\n");
    } else {
      std::printf("{\"error\": \"no such order\"}\n");
    }
    std::fflush(stdout);
  }
  delete team;
}

void measure(int world, std::size_t bytes) {
  constexpr int kCalls = 20;
  Team team(world, bytes);
  const Blocks blocks = prepare(team);
  std::printf(
      "{\"world\": %d, \"bytes\": %zu, \"staged_block_bytes\": %zu, "
      "\"gather_block_bytes\": %zu",
      world, bytes, blocks.staged * sizeof(float), blocks.gather * sizeof(float));
  for (const char* name : {"staged", "agreed-staged", "gather", "agreed-gather", "scratch",
                           "agreed-scratch", "copy1", "copy", "add1", "add"}) {
    Order order;
    parse(name, blocks, order);
    order.calls = kCalls;
    team.run(order);
    std::printf(", \"%s\": %.9f", name, team.median(order));
  }
  std::printf("}\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int world = argc > 1 ? std::atoi(argv[1]) : 0;
  if (world < 2 || world > kMaxWorld) {
    std::fprintf(stderr, "usage: roofline WORLD [BYTES ...], WORLD in 2..%d\n", kMaxWorld);
    return 2;
  }
  std::signal(SIGPIPE, SIG_IGN);
  for (int i = 2; i < argc; ++i) measure(world, std::strtoull(argv[i], nullptr, 10));
  if (argc == 2) answer_orders(world);
  return 0;
}
