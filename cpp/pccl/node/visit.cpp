#include "pccl/node/visit.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "pccl/base/fork.h"

namespace pccl::node {
namespace {

constexpr Duration kSlice = std::chrono::milliseconds(100);  // between two looks for Ctrl-C

// Tells every runtime that the thread has used when the thread ends.
class ThreadTrace {
 public:
  ~ThreadTrace() {
    if (fork_generation() != generation_) return;
    for (const auto& used : used_) {
      if (const auto runtime = used.lock()) Runtime::thread_ended(runtime, *life_);
    }
  }
  [[nodiscard]] const std::shared_ptr<const std::uint64_t>& life() const { return life_; }
  void uses(const std::shared_ptr<Runtime>& runtime) {
    bool known = false;
    std::erase_if(used_, [&](const std::weak_ptr<Runtime>& used) {
      known = known || (!used.owner_before(runtime) && !runtime.owner_before(used));
      return used.expired();
    });
    if (!known) used_.push_back(runtime);
  }

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }
  const std::shared_ptr<const std::uint64_t> life_ =
      std::make_shared<const std::uint64_t>(next_number());
  const std::uint64_t generation_ = fork_generation();
  std::vector<std::weak_ptr<Runtime>> used_;
};

ThreadTrace& trace() {
  thread_local ThreadTrace made;
  return made;
}

}  // namespace

const std::shared_ptr<const std::uint64_t>& this_thread() { return trace().life(); }

Visit::Visit(std::shared_ptr<Runtime> runtime, const Until& until)
    : runtime_(std::move(runtime)),
      until_(until),
      turn_(runtime_->driver()),
      thread_(*this_thread()) {
  trace().uses(runtime_);
  engine().threads().inside(thread_);
}

Visit::~Visit() {
  engine().threads().outside(thread_);
  runtime_->act();
  if (runtime_->unfinished() != 0) runtime_->driver().attend();
}

bool Visit::drive(const std::function<bool()>& done, const std::optional<Instant>& deadline) {
  const Instant slice = clock_now() + kSlice;
  return runtime_->driver().wait(done, deadline ? std::min(slice, *deadline) : slice);
}

bool Visit::interrupted(const Limit& limit) {
  bool answer = false;
  if (limit.interrupted) outside([&] { answer = limit.interrupted(); });
  return answer;
}

}  // namespace pccl::node
