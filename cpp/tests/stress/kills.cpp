// The parent process has no threads, so it may fork at any time. It observes the workers only
// through shared memory.
#include "tests/stress/kills.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pccl/base/log.h"
#include "pccl/server/server.h"
#include "tests/stress/ledger.h"
#include "tests/stress/worker.h"

namespace pccl::stress {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long a process stays stopped. It then receives all decisions and losses of that time at once.
constexpr Duration kPause = milliseconds(30);
constexpr Duration kPatience = std::chrono::seconds(60);  // after this, a process counts as hanging
// The polling interval of the shared memory. Correctness does not depend on it.
constexpr Duration kGlance = std::chrono::microseconds(200);

struct Run {
  bool freezes = false;
  std::uint64_t seed = 0;
  wire::Address master;
  Settings settings;
  std::mt19937_64 rng;
  std::array<std::uint64_t, kSizes> inside{};  // hits, by size
  std::uint64_t elsewhere = 0;
  std::uint64_t pairs = 0;
  std::uint64_t evicted = 0;  // members that were not frozen
  Duration longest{};         // from one hit until all shared memory again

  [[nodiscard]] std::uint64_t hits() const { return inside[0] + inside[1] + inside[2]; }
};

pid_t spawn(const std::function<int()>& work) {
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) throw Violation("cannot fork");
  if (child > 0) return child;
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  std::exit(work());  // NOLINT: it has threads only while it works
}

// The workers of one group, and the next victim.
class Pack {
 public:
  Pack(Run& run, std::uint32_t number, std::size_t world)
      : run_(run), number_(number), world_(world) {
    void* const memory =
        ::mmap(nullptr, sizeof(Group), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Violation("no memory");
    group_ = new (memory) Group;
    now_is(State::settling);
  }
  ~Pack() {
    for (const Child& child : children_) {
      if (child.pid == 0) continue;
      ::kill(child.pid, SIGKILL);
      ::waitpid(child.pid, nullptr, 0);
    }
    ::munmap(group_, sizeof(Group));
  }
  Pack(const Pack&) = delete;
  Pack& operator=(const Pack&) = delete;

  // False: all workers have left.
  bool step(bool enough) {
    for (std::size_t i = 0; i < kSlots; ++i) {
      hear(i);
      look_after(i);
    }
    if (ledger_.newest() > 2) ledger_.settle(ledger_.newest() - 2);
    if (steady_clock::now() - since_ > kPatience) throw Violation(who_waits());
    switch (state_) {
      case State::settling:
        settle(enough);
        break;
      case State::hunting:
        if (run_.freezes ? children_.at(victims_[0]).stopped : living(victims_) == 0) struck();
        break;
      case State::evicting:
        if (others([&](std::size_t i) { return children_.at(i).without; })) {
          ::kill(children_.at(victims_[0]).pid, SIGCONT);
          children_.at(victims_[0]).stopped = false;
          now_is(State::waking);
        }
        break;
      case State::waking:
        if (children_.at(victims_[0]).out) {
          group_->orders.reported = group_->orders.frozen.load();
          now_is(State::verifying);
        }
        break;
      case State::verifying:
        if (others([&](std::size_t i) {
              return group_->slots.at(i).verified == group_->orders.reported;
            })) {
          children_.at(victims_[0]).doomed = false;
          now_is(State::settling);
        }
        break;
      case State::leaving:
        if (living({0, 1, 2, 3}) > 0) break;
        ledger_.close();
        return false;
    }
    return true;
  }

  [[nodiscard]] const Totals& totals() const { return ledger_.totals(); }

 private:
  enum class State { settling, hunting, evicting, waking, verifying, leaving };
  struct Child {
    pid_t pid = 0;
    bool doomed = false;
    bool stopped = false;
    Instant stopped_at;
    bool without = false;  // has committed without the frozen one
    bool out = false;      // was evicted
  };

  void now_is(State state) {
    state_ = state;
    since_ = steady_clock::now();
  }

  [[nodiscard]] std::size_t living(const std::vector<std::size_t>& of) const {
    return static_cast<std::size_t>(std::count_if(
        of.begin(), of.end(), [&](std::size_t i) { return children_.at(i).pid != 0; }));
  }

  // Whether the condition holds for all workers except the frozen one.
  [[nodiscard]] bool others(const std::function<bool(std::size_t)>& holds) const {
    for (std::size_t i = 0; i < kSlots; ++i) {
      if (children_.at(i).pid != 0 && i != victims_[0] && !holds(i)) return false;
    }
    return true;
  }

  void fill() {
    for (std::size_t i = 0; i < kSlots && living({0, 1, 2, 3}) < world_; ++i) {
      if (children_.at(i).pid != 0) continue;
      Slot* const slot = new (&group_->slots.at(i)) Slot;
      WorkerOptions options{run_.master, number_, run_.seed, run_.rng(), run_.settings};
      children_.at(i) = {};
      children_.at(i).pid = spawn([&] { return run_worker(options, group_->orders, *slot); });
    }
  }

  // Chooses the next victims once all workers share memory. `enough`: ends the workers instead.
  void settle(bool enough) {
    if (enough) {
      group_->orders.stop = true;
      return now_is(State::leaving);
    }
    fill();
    victims_.clear();
    for (std::size_t i = 0; i < kSlots; ++i) {
      if (children_.at(i).pid == 0) continue;
      if (group_->slots.at(i).world != world_) return;
      victims_.push_back(i);
    }
    std::shuffle(victims_.begin(), victims_.end(), run_.rng);
    const bool two = !run_.freezes && victims_.size() > 2 && run_.rng() % 5 == 0;
    const std::size_t count = two ? 2 : 1;
    const auto size = static_cast<Size>(run_.rng() % kSizes);
    if (!run_.freezes && run_.rng() % 2 == 0) order(victims_.at(count), SIGSTOP, size);
    victims_.resize(count);
    for (const std::size_t i : victims_) {
      order(i, run_.freezes ? SIGSTOP : SIGKILL, size);
      children_.at(i).doomed = true;
      children_.at(i).out = false;
    }
    run_.longest = std::max(run_.longest, steady_clock::now() - since_);
    now_is(State::hunting);
  }

  void order(std::size_t i, int signal, Size size) {
    Slot& slot = group_->slots.at(i);
    slot.signal = signal;
    slot.order_size = size;
    slot.at = run_.rng() % 1200;
    slot.order = slot.order + 1;
  }

  // The victims are dead, or the victim is frozen.
  void struck() {
    if (!run_.freezes) {
      run_.pairs += victims_.size() - 1;
      world_ = std::max<std::size_t>(2 + run_.rng() % 3, living({0, 1, 2, 3}));
      return now_is(State::settling);
    }
    const Slot& slot = group_->slots.at(victims_[0]);
    Child& victim = children_.at(victims_[0]);
    hear(victims_[0]);
    if (victim.out) {  // evicted earlier for being slow: it is not a member
      ::kill(victim.pid, SIGCONT);
      victim.stopped = victim.doomed = false;
      return now_is(State::settling);
    }
    count(slot);
    frozen_ = slot.self;
    for (Child& child : children_) child.without = child.out = false;
    group_->orders.frozen = group_->orders.frozen + 1;
    now_is(State::evicting);
  }

  // Records where the victim was hit.
  void count(const Slot& slot) {
    if (slot.stage != Stage::reducing) {
      ++run_.elsewhere;
      return;
    }
    ++run_.inside.at(static_cast<std::size_t>(slot.size.load()));
    ledger_.cut(slot.self, slot.key);
  }

  void hear(std::size_t i) {
    Slot& slot = group_->slots.at(i);
    Child& child = children_.at(i);
    const std::uint64_t written = slot.written;
    for (std::uint64_t number = slot.read; number < written; ++number) {
      const Event event = slot.events.at(number % kEvents);
      ledger_.add(event);
      if (event.kind == Event::Kind::out) {
        if (!run_.freezes || !child.doomed) ++run_.evicted;
        child.out = true;
      }
      if (state_ == State::evicting && event.kind == Event::Kind::committed &&
          std::find(event.members.begin(), event.members.end(), frozen_) == event.members.end()) {
        child.without = true;
      }
    }
    slot.read = written;
  }

  // Whether the process has stopped or ended as expected.
  void look_after(std::size_t i) {
    Child& child = children_.at(i);
    int status = 0;
    if (child.pid == 0) return;
    if (!run_.freezes && child.stopped && steady_clock::now() - child.stopped_at >= kPause) {
      child.stopped = false;
      ::kill(child.pid, SIGCONT);
    }
    if (::waitpid(child.pid, &status, WNOHANG | WUNTRACED) != child.pid) return;
    if (WIFSTOPPED(status)) {
      child.stopped = true;
      child.stopped_at = steady_clock::now();
      return;
    }
    child.pid = 0;
    hear(i);
    const Slot& slot = group_->slots.at(i);
    const bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && child.doomed;
    const bool left = WIFEXITED(status) && WEXITSTATUS(status) == 0 && state_ == State::leaving;
    if (!killed && !left) {
      throw Violation("worker " + slot.self.brief() + ": " +
                      (slot.failure[0] != '\0' ? std::string(slot.failure.data())
                                               : "ended with status " + std::to_string(status)));
    }
    if (killed) count(slot);
    ledger_.ended(slot.self,
                  slot.stage == Stage::elsewhere ? std::nullopt : std::optional(slot.key));
  }

  [[nodiscard]] std::string who_waits() const {
    std::string text = "hangs in state " + std::to_string(static_cast<int>(state_));
    for (std::size_t i = 0; i < kSlots; ++i) {
      const Slot& slot = group_->slots.at(i);
      if (children_.at(i).pid == 0) continue;
      text += "; " + slot.self.brief() + (children_.at(i).stopped ? " (frozen)" : "") +
              " in stage " + std::to_string(static_cast<int>(slot.stage.load())) +
              " of operation " + std::to_string(slot.key.sequence) + " of admission " +
              std::to_string(slot.key.admission) + ", world " + std::to_string(slot.world);
    }
    return text;
  }

  Run& run_;
  std::uint32_t number_;
  std::size_t world_;
  Group* group_ = nullptr;
  Ledger ledger_;
  std::array<Child, kSlots> children_;
  std::vector<std::size_t> victims_;
  PeerId frozen_;
  State state_ = State::settling;
  Instant since_;
};

// Serves until the other end of `until` is closed.
int serve(const Settings& settings, int told, int until) {
  server::Server server({"127.0.0.1", 0}, settings);
  if (!server.run()) return 1;
  const std::string& address = server.address();
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  if (::write(told, &port, sizeof port) != sizeof port) return 1;
  char none = 0;
  (void)!::read(until, &none, 1);
  server.interrupt();
  return 0;
}

class MasterProcess {
 public:
  explicit MasterProcess(const Settings& settings) {
    int told[2];
    int until[2];
    if (::pipe(told) != 0 || ::pipe(until) != 0) throw Violation("no pipe");
    pid_ = spawn([&] {
      ::close(until[1]);
      return serve(settings, told[1], until[0]);
    });
    ::close(told[1]);
    ::close(until[0]);
    ends_ = until[1];
    const bool ready = ::read(told[0], &port_, sizeof port_) == sizeof port_;
    ::close(told[0]);
    if (!ready) throw Violation("no master");
  }
  // REQUIRES: no other child has a copy of the pipe's end.
  ~MasterProcess() {
    ::close(ends_);
    ::waitpid(pid_, nullptr, 0);
  }
  MasterProcess(const MasterProcess&) = delete;
  MasterProcess& operator=(const MasterProcess&) = delete;
  [[nodiscard]] wire::Address address() const { return {"127.0.0.1", port_}; }

 private:
  pid_t pid_ = 0;
  int ends_ = -1;
  std::uint16_t port_ = 0;
};

void print(const char* what, const Run& run, const std::vector<std::unique_ptr<Pack>>& packs) {
  Totals all;
  for (const auto& pack : packs) {
    const Totals& totals = pack->totals();
    all.committed += totals.committed;
    all.rerun += totals.rerun;
    all.failed += totals.failed;
    all.counted += totals.counted;
    all.in_memory += totals.in_memory;
    all.hit_with += totals.hit_with;
    all.hit_without += totals.hit_without;
    all.hit_failed += totals.hit_failed;
  }
  const auto text = [](std::uint64_t value) { return std::to_string(value); };
  const std::string line =
      text(run.hits()) + " inside a reduction (" + text(run.inside[0]) + " tiny, " +
      text(run.inside[1]) + " medium, " + text(run.inside[2]) + " large; " + text(all.hit_with) +
      " committed with it, " + text(all.hit_without) + " without it, " + text(all.hit_failed) +
      " failed), " + text(run.elsewhere) + " elsewhere, " + text(run.pairs) + " pairs, " +
      text(run.evicted) + " slow ones put out; " + text(all.committed) + " reductions (" +
      text(all.rerun) + " run again, " + text(all.in_memory) + " of " + text(all.counted) +
      " seen in memory), " + text(all.failed) + " failed";
  std::printf("%s: seed %llu: %s; together again within %.1f s: all agree\n", what,
              static_cast<unsigned long long>(run.seed), line.c_str(), in_seconds(run.longest));
}

int hunt(Run& run, std::uint64_t count) {
  const char* const what = run.freezes ? "freezes" : "kills";
  if (std::getenv("PCCL_LOG_LEVEL") == nullptr) set_log_level(LogLevel::err);  // expected losses
  try {
    const MasterProcess master(run.settings);
    run.master = master.address();
    // Waiting for an eviction takes time and no work, so several groups do it side by side.
    std::vector<std::unique_ptr<Pack>> packs;
    for (std::uint32_t i = 0; i < (run.freezes ? 4U : 2U); ++i)
      packs.push_back(std::make_unique<Pack>(run, i, 2 + i % 3));
    for (bool busy = true; busy;) {
      busy = false;
      for (const auto& pack : packs) busy = pack->step(run.hits() >= count) || busy;
      std::this_thread::sleep_for(kGlance);
    }
    print(what, run, packs);
    if (!run.freezes && run.evicted > 0)
      throw Violation("members were put out that nobody had killed");
    return 0;
  } catch (const Violation& violation) {
    std::fprintf(stderr, "%s: seed %llu, after %llu: %s\n", what,
                 static_cast<unsigned long long>(run.seed),
                 static_cast<unsigned long long>(run.hits()), violation.what());
    return 1;
  }
}

Run prepared(std::uint64_t seed) {
  Run run;
  const Result<Settings> settings = Settings::from_environment();
  if (!settings) {
    std::fprintf(stderr, "stress: %s\n", settings.error().reason.c_str());
    std::exit(2);  // NOLINT: no threads
  }
  run.settings = *settings;
  run.settings.bind_address = "127.0.0.1";
  run.seed = seed;
  run.rng.seed(seed);
  return run;
}

}  // namespace

int run_kills(std::uint64_t count, std::uint64_t seed) {
  Run run = prepared(seed);
  return hunt(run, count);
}

int run_freezes(std::uint64_t count, std::uint64_t seed) {
  Run run = prepared(seed);
  run.freezes = true;
  run.settings.heartbeat_interval = milliseconds(60);
  run.settings.heartbeat_timeout = milliseconds(300);
  run.settings.link_timeout = milliseconds(200);
  return hunt(run, count);
}

}  // namespace pccl::stress
