// Between processes TSan sees no order at all, and peers of one process map each other's memory at
// other addresses. Here all ranks use the same addresses, so a plain byte that no release and
// acquire orders is a race that TSan reports.
//
// Nothing but the boards and the word orders the ranks here: whatever else they tell each other
// goes through relaxed atomics. Bells have fences, as the kernel has for the sockets of real ones;
// TSan does not see fences. Every result is checked, all ranks must commit the same calls, and a
// rank that nobody rings fails the run. That also holds without TSan, where the processor may
// reorder what TSan keeps in order.
#include "tests/stress/memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "pccl/memory/local_group.h"
#include "pccl/memory/pipe.h"

namespace pccl::stress {
namespace {

using collective::Kind;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint32_t kRanks = 3;
constexpr std::uint64_t kCalls = 12;         // in an epoch
constexpr std::uint64_t kEpochs = 1U << 12;  // at most
constexpr std::uint64_t kMostElements = 2000;
constexpr std::size_t kArrayBytes = kMostElements * kRanks * sizeof(std::int64_t);
// Arrays of a rank: the input and the result of each call of two epochs. A rank that is late in a
// closed epoch may still read those of the epoch before.
constexpr std::size_t kArrays = 2 * kCalls * 2;
constexpr std::uint64_t kNumber = 1;                  // of every region
constexpr Duration kPatience = milliseconds(1);       // for a call that is not made
constexpr Duration kLost = std::chrono::seconds(60);  // asleep for so long, a rank was forgotten
constexpr std::int64_t kSpoiltValue = -77;            // what a caller writes after the end

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "stress in memory: %s\n", what);
  std::abort();
}

// Zeroed memory at one address, and a Region of its own for each user. A shared counter of users
// would order them.
class Memory {
 public:
  explicit Memory(std::size_t size)
      : size_(size),
        data_(static_cast<std::uint8_t*>(std::aligned_alloc(4096, (size + 4095) / 4096 * 4096))) {
    if (data_ == nullptr) fail("no memory");
    std::fill_n(data_, size, std::uint8_t{0});
  }
  ~Memory() { std::free(data_); }  // NOLINT
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  [[nodiscard]] std::uint8_t* data() const { return data_; }
  [[nodiscard]] memory::RegionPtr view(std::size_t at, std::size_t size) const {
    return std::make_shared<memory::Region>(data_ + at, size, -1, std::make_shared<int>(0));
  }
  [[nodiscard]] memory::RegionPtr view() const { return view(0, size_); }

 private:
  std::size_t size_;
  std::uint8_t* data_;
};

// Wakes a thread. Only fences order what the two know, and TSan does not see them.
class Bell {
 public:
  void ring() {
    std::atomic_thread_fence(std::memory_order_release);
    rung_.store(true, std::memory_order_relaxed);
  }
  // Returns when it has rung, or at `until`. Fails the run if it rings too late.
  void wait(Instant until) {
    const Instant begin = steady_clock::now();
    while (!rung_.exchange(false, std::memory_order_relaxed)) {
      const Instant now = steady_clock::now();
      if (now >= until) break;
      if (now - begin > kLost) fail("a wake-up was lost");
      std::this_thread::yield();
    }
    std::atomic_thread_fence(std::memory_order_acquire);
  }

 private:
  alignas(64) std::atomic<bool> rung_{false};
};

// A call, equal on all ranks.
struct Call {
  collective::Collective what;
  std::uint64_t count = 0;
  bool in_place = false;
  bool shared = false;     // others may read its arrays
  bool disagree = false;   // the ranks' signatures differ
  bool withdrawn = false;  // one rank gives it up early
};

Call call_of(std::uint64_t seed, std::uint64_t epoch, std::uint64_t number) {
  std::mt19937_64 rng(seed + epoch * kCalls + number);
  Call call;
  call.what = {static_cast<Kind>(rng() % collective::kKindCount),
               static_cast<std::uint32_t>(rng() % kRanks)};
  const bool small = rng() % 2 == 0;
  call.count = 1 + rng() % (small ? 20 : kMostElements);
  call.in_place =
      call.what.kind != Kind::all_gather && !collective::scatters(call.what.kind) && rng() % 2 == 0;
  call.shared = rng() % 2 == 0;
  call.disagree = rng() % 8 == 0;
  // A large one that goes on elsewhere has the one race that is allowed: see record 062.
  call.withdrawn = small && rng() % 4 == 0;
  return call;
}

std::int64_t value_of(std::uint64_t epoch, std::uint64_t number, std::uint32_t rank,
                      std::uint64_t element) {
  return static_cast<std::int64_t>((epoch * 31 + number * 7 + element) * (rank + 1));
}

// All that the ranks share.
struct World {
  std::uint64_t seed = 0;
  Instant end;
  Memory pages{kEpochs * sizeof(memory::Page)};
  std::vector<std::unique_ptr<Memory>> boards, scratch, arrays;
  std::array<Bell, kRanks> bells;
  std::atomic<std::uint64_t> over{0};              // the newest epoch that a rank left early
  std::atomic<std::uint64_t> last{kEpochs};        // the epoch that ends the run
  std::unique_ptr<std::atomic<bool>[]> withdrawn;  // by call
  std::unique_ptr<std::atomic<std::uint32_t>[]> committed;

  World()
      : withdrawn(std::make_unique<std::atomic<bool>[]>(kEpochs * kCalls)),
        committed(std::make_unique<std::atomic<std::uint32_t>[]>(kEpochs * kCalls)) {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      boards.push_back(std::make_unique<Memory>(memory::kBoardBytes));
      scratch.push_back(std::make_unique<Memory>(kArrayBytes));
      arrays.push_back(std::make_unique<Memory>(kArrays * kArrayBytes));
    }
  }
  void ring_all() {
    for (Bell& bell : bells) bell.ring();
  }
};

struct Counts {
  std::uint64_t epochs = 0;
  std::uint64_t commits = 0;
  std::uint64_t escalated = 0;
  std::uint64_t withdrawn = 0;
  std::uint64_t sleeps = 0;
};

class Rank final : public memory::LocalHost {
 public:
  Rank(World& world, std::uint32_t rank)
      : world_(world), rank_(rank), rng_(world.seed + rank), group_(options(), *this) {
    for (std::uint32_t other = 0; other < kRanks; ++other) {
      scratch_.push_back(world.scratch[other]->view());
      arrays_.push_back(world.arrays[other]->view());
    }
    chunk_ = std::make_shared<memory::Chunk>(memory::Chunk{arrays_[rank], kNumber});
  }

  void live() {
    for (std::uint64_t epoch = 1; epoch < kEpochs; ++epoch) {
      if (rank_ == 0 && steady_clock::now() >= world_.end) {
        world_.last.store(epoch, std::memory_order_relaxed);
        world_.ring_all();
      }
      begin(epoch);
      while (!open_.empty() && stays()) act();
      if (!group_.close()) fail("the result of a committed call cannot be read");
      if (world_.last.load(std::memory_order_relaxed) <= epoch) return;
    }
  }
  [[nodiscard]] const Counts& counts() const { return counts_; }

  void local_committed(const memory::LocalCommit& commit) override {
    const std::uint64_t number = commit.key.tag;
    const Call& call = calls_.at(number);
    if (call.disagree) fail("ranks that disagree have committed");
    check(number, call);
    // The caller may do as it likes with its arrays now.
    std::fill_n(array(number, 0), call.count, kSpoiltValue);
    std::fill_n(array(number, 1), call.count, kSpoiltValue);
    world_.committed[index_of(number)].fetch_add(1, std::memory_order_relaxed);
    open_.erase(number);
    ++counts_.commits;
    ++committed_;
  }
  void local_escalated(const wire::OpKey& key) override {
    open_.erase(key.tag);
    escalated_.push_back(key);
    ++counts_.escalated;
  }
  void ring(std::uint32_t rank) override { world_.bells.at(rank).ring(); }
  [[nodiscard]] bool admission_due() const override { return false; }
  [[nodiscard]] Result<std::pair<memory::RegionPtr, std::uint64_t>> take_scratch(
      std::size_t bytes) override {
    if (bytes > scratch_[rank_]->size()) fail("more scratch memory than the arrays have");
    return std::pair{scratch_[rank_], kNumber};
  }
  [[nodiscard]] memory::RegionPtr scratch_of(std::uint32_t rank, std::uint64_t number) override {
    return number == kNumber ? scratch_.at(rank) : nullptr;
  }
  [[nodiscard]] std::optional<memory::Place> place_of(const void* data, std::size_t) override {
    const auto at = static_cast<std::uint64_t>(static_cast<const std::uint8_t*>(data) -
                                               world_.arrays[rank_]->data());
    if (!calls_.at(at / kArrayBytes / 2 % kCalls).shared) return std::nullopt;
    return memory::Place{chunk_, at};
  }
  [[nodiscard]] bool may_share(const std::vector<memory::ChunkPtr>&) override { return true; }
  bool share(const memory::ChunkPtr&) override { return false; }
  [[nodiscard]] memory::RegionPtr array_of(std::uint32_t rank, std::uint64_t number) override {
    return number == kNumber ? arrays_.at(rank) : nullptr;
  }
  [[nodiscard]] Unmapped unmapped() const override { return {}; }

 private:
  // Small blocks, so that there are many of them, and short spins, so that ranks sleep.
  static memory::LocalOptions options() {
    memory::LocalOptions options;
    options.spin = std::chrono::microseconds(20);
    options.patience = kPatience;
    options.inline_bytes = 1 << 10;
    options.segment_bytes = 8 << 10;
    options.least_segment_bytes = 1 << 10;
    options.moves = 4;
    return options;
  }

  [[nodiscard]] std::uint64_t index_of(std::uint64_t number) const {
    return epoch_ * kCalls + number;
  }
  // The input (0) or the result (1) of a call.
  [[nodiscard]] std::int64_t* array(std::uint64_t number, std::size_t which) const {
    const std::size_t index = (epoch_ % 2 * kCalls + number) * 2 + which;
    return reinterpret_cast<std::int64_t*>(world_.arrays[rank_]->data() + index * kArrayBytes);
  }

  void begin(std::uint64_t epoch) {
    epoch_ = epoch;
    committed_ = 0;
    leaves_after_ = rng_() % 4 == 0 ? 1 + rng_() % kCalls : kCalls + 1;
    calls_.clear();
    open_.clear();
    std::vector<memory::RegionPtr> boards;
    for (const auto& board : world_.boards) boards.push_back(board->view());
    group_.open(1, epoch, rank_, std::move(boards),
                world_.pages.view(epoch * sizeof(memory::Page), sizeof(memory::Page)));
    std::vector<std::uint64_t> order;
    for (std::uint64_t number = 0; number < kCalls; ++number) {
      calls_.push_back(call_of(world_.seed, epoch, number));
      order.push_back(number);
    }
    // Each rank begins with another call. All but rank 0 have to take theirs back.
    std::shuffle(order.begin(), order.end(), rng_);
    for (const std::uint64_t number : order) submit(number);
  }

  void submit(std::uint64_t number) {
    const Call& call = calls_.at(number);
    memory::LocalRequest request;
    request.key = {.admission = 1, .tagged = true, .tag = number, .sequence = epoch_};
    request.what = call.what;
    request.parts = collective::scatters(call.what.kind) ? kRanks : 1;
    request.signature = call.disagree ? rank_ : call.count;
    std::int64_t* const send = array(number, 0);
    std::int64_t* const recv = array(number, call.in_place ? 0 : 1);
    for (std::uint64_t i = 0; i < call.count * request.parts; ++i)
      send[i] = value_of(epoch_, number, rank_, i);
    request.arrays.push_back({send, recv, call.count, DataType::int64});
    open_.insert({number, request.key});
    group_.submit(std::move(request));
  }

  void check(std::uint64_t number, const Call& call) const {
    const Kind kind = call.what.kind;
    const std::int64_t* const result = array(number, call.in_place ? 0 : 1);
    for (std::uint64_t i = 0; i < call.count; ++i) {
      const auto at = [&](std::uint32_t rank, std::uint64_t element) {
        return value_of(epoch_, number, rank, element);
      };
      const std::uint64_t own = i + (collective::scatters(kind) ? rank_ * call.count : 0);
      bool right = true;
      if (collective::reduces(kind)) {
        std::int64_t sum = 0;
        for (std::uint32_t rank = 0; rank < kRanks; ++rank) sum += at(rank, own);
        right = result[i] == sum;
      } else if (kind == Kind::broadcast) {
        right = result[i] == at(call.what.root, i);
      } else {
        for (std::uint32_t rank = 0; rank < kRanks; ++rank)
          right = right && result[rank * call.count + i] == at(rank, own);
      }
      if (!right) fail("a wrong result");
    }
  }

  // Whether the epoch goes on for this rank.
  bool stays() {
    if (world_.last.load(std::memory_order_relaxed) <= epoch_) return false;
    if (world_.over.load(std::memory_order_relaxed) >= epoch_) return false;
    // All ranks have opened it, since they have committed in it: so none is two epochs behind.
    if (committed_ < leaves_after_) return true;
    world_.over.store(epoch_, std::memory_order_relaxed);
    world_.ring_all();
    return false;
  }

  // Gives up a call, as the master tells all ranks to.
  void withdraw(std::uint64_t number) {
    if (!world_.withdrawn[index_of(number)].exchange(true, std::memory_order_relaxed))
      world_.ring_all();
    if (!group_.withdraw(open_.at(number))) return;  // it is committed
    open_.erase(number);
    ++counts_.withdrawn;
  }

  void act() {
    for (std::uint64_t number = 0; number < kCalls; ++number) {
      const bool given_up =
          calls_.at(number).withdrawn && number % kRanks == rank_ && rng_() % 64 == 0;
      if (open_.contains(number) &&
          (given_up || world_.withdrawn[index_of(number)].load(std::memory_order_relaxed)))
        withdraw(number);
    }
    const Instant now = steady_clock::now();
    switch (group_.step(now)) {
      case Pace::working:
      case Pace::spinning:
        break;
      case Pace::yielding:
        std::this_thread::yield();
        break;
      case Pace::idle:
        if (!group_.fall_asleep(now)) break;
        ++counts_.sleeps;
        sleep(now);
        break;
    }
    if (group_.broken()) fail("the page has an impossible value");
    for (const wire::OpKey& key : std::exchange(escalated_, {})) group_.forget(key);
  }

  void sleep(Instant now) {
    // The deadline of a sleep that somebody must ring is later, and not waited for.
    const Instant until = group_.next_deadline().value_or(Instant::max());
    world_.bells.at(rank_).wait(until - now > 10 * kPatience ? Instant::max() : until);
  }

  World& world_;
  std::uint32_t rank_;
  std::mt19937_64 rng_;
  std::vector<memory::RegionPtr> scratch_, arrays_;
  memory::ChunkPtr chunk_;
  std::uint64_t epoch_ = 0;
  std::uint64_t committed_ = 0;     // in this epoch
  std::uint64_t leaves_after_ = 0;  // so many commits in this epoch
  std::vector<Call> calls_;
  std::map<std::uint64_t, wire::OpKey> open_;
  std::vector<wire::OpKey> escalated_;
  Counts counts_;
  memory::LocalGroup group_;
};

// Both ends of a pipe write and read all the time.
class End {
 public:
  End(const Memory& own, const Memory& other, Bell& mine, Bell& theirs, std::uint64_t seed)
      : pipe_(own.view(), other.view()), mine_(mine), theirs_(theirs), rng_(seed) {}

  // Moves that many bytes each way.
  void move(std::uint64_t bytes) {
    while (sent_ < bytes || read_ < bytes) {
      const bool moved = (sent_ < bytes && write(bytes)) | (read_ < bytes && read());
      if (pipe_.must_ring()) theirs_.ring();
      if (!moved && pipe_.fall_asleep(read_ < bytes, sent_ < bytes)) mine_.wait(Instant::max());
      pipe_.wake_up();
    }
  }

 private:
  static std::uint8_t byte_at(std::uint64_t at) {
    return static_cast<std::uint8_t>(at * 2654435761U >> 13U);
  }

  bool write(std::uint64_t bytes) {
    buffer_.resize(std::min<std::uint64_t>(1 + rng_() % 50'000, bytes - sent_));
    for (std::size_t i = 0; i < buffer_.size(); ++i) buffer_[i] = byte_at(sent_ + i);
    const iovec part{buffer_.data(), buffer_.size()};
    const ssize_t done = pipe_.write({&part, 1});
    if (done < 0 && done != -EAGAIN) fail("the counts of a pipe are impossible");
    if (done > 0) sent_ += static_cast<std::uint64_t>(done);
    return done > 0;
  }
  bool read() {
    buffer_.resize(1 + rng_() % 50'000);
    const iovec part{buffer_.data(), buffer_.size()};
    const ssize_t done = pipe_.read({&part, 1});
    if (done < 0 && done != -EAGAIN) fail("the counts of a pipe are impossible");
    for (ssize_t i = 0; i < done; ++i) {
      if (buffer_[static_cast<std::size_t>(i)] != byte_at(read_++)) fail("a wrong byte in a pipe");
    }
    return done > 0;
  }

  memory::Pipe pipe_;
  Bell& mine_;
  Bell& theirs_;
  std::mt19937_64 rng_;
  std::vector<std::uint8_t> buffer_;
  std::uint64_t sent_ = 0;
  std::uint64_t read_ = 0;
};

// Pipes until then. Returns the bytes that went each way.
std::uint64_t run_pipes(Instant end, std::uint64_t seed) {
  constexpr std::uint64_t kBytes = 8 * memory::kPipeBytes;
  std::uint64_t moved = 0;
  do {
    const Memory a(memory::kPipeEndBytes);
    const Memory b(memory::kPipeEndBytes);
    std::array<Bell, 2> bells;
    std::thread other([&] { End(b, a, bells[1], bells[0], seed + 1).move(kBytes); });
    End(a, b, bells[0], bells[1], seed).move(kBytes);
    other.join();
    moved += kBytes;
  } while (steady_clock::now() < end);
  return moved;
}

// Ranks that reduce until then, or until all epochs are used up. Adds what they did.
void run_ranks(Instant end, std::uint64_t seed, Counts& all) {
  World world;
  world.seed = seed;
  world.end = end;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (std::uint32_t rank = 0; rank < kRanks; ++rank)
    ranks.push_back(std::make_unique<Rank>(world, rank));
  std::vector<std::thread> threads;
  for (const auto& rank : ranks) threads.emplace_back([&rank] { rank->live(); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& rank : ranks) {
    all.commits += rank->counts().commits;
    all.escalated += rank->counts().escalated;
    all.withdrawn += rank->counts().withdrawn;
    all.sleeps += rank->counts().sleeps;
  }
  for (std::uint64_t call = 0; call < kEpochs * kCalls; ++call) {
    const std::uint32_t members = world.committed[call].load();
    if (members != 0 && members != kRanks)
      fail("some ranks have committed a call, others have not");
  }
  all.epochs += std::min(world.last.load(), kEpochs - 1);
}

}  // namespace

int run_memory(Duration length, std::uint64_t seed) {
  const Instant begin = steady_clock::now();
  const Instant end = begin + length * 3 / 4;
  Counts all;
  for (std::uint64_t run = 0; run == 0 || steady_clock::now() < end; ++run)
    run_ranks(end, seed + run * kEpochs * kCalls, all);
  const std::uint64_t piped = run_pipes(begin + length, seed);
  std::printf(
      "stress in memory: seed %llu: %llu calls committed in %llu epochs, %llu escalated, %llu "
      "withdrawn, %llu sleeps, %llu MiB piped each way: all results right\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(all.commits / kRanks),
      static_cast<unsigned long long>(all.epochs),
      static_cast<unsigned long long>(all.escalated / kRanks),
      static_cast<unsigned long long>(all.withdrawn), static_cast<unsigned long long>(all.sleeps),
      static_cast<unsigned long long>(piped >> 20));
  return all.commits > 0 && all.escalated > 0 && all.withdrawn > 0 && all.sleeps > 0 ? 0 : 1;
}

}  // namespace pccl::stress
