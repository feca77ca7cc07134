#include "pccl/node/toucher.h"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <utility>

#include "pccl/io/thread.h"
#include "pccl/os/pages.h"

namespace pccl::node {
namespace {

// Touched between two looks whether the memory is still wanted; no block that is smaller is.
constexpr std::size_t kTouchBytes = 4 << 20;

}  // namespace

void Toucher::add(std::vector<BufferPtr> memory) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  std::copy_if(memory.begin(), memory.end(), std::back_inserter(memory_),
               [](const BufferPtr& block) { return block->size() >= kTouchBytes; });
  if (working_ || memory_.empty()) return;
  if (thread_.joinable()) thread_.join();  // it has nothing left to do
  try {
    thread_ = io::start_thread([this] { work(); });
    working_ = true;
  } catch (const std::system_error&) {
    memory_.clear();  // the thread that receives touches it
  }
}

void Toucher::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    memory_.clear();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
}

// Null: there is none, and the thread ends.
BufferPtr Toucher::next() {
  const std::lock_guard lock(mutex_);
  working_ = !memory_.empty();
  if (!working_) return nullptr;
  BufferPtr memory = std::move(memory_.front());
  memory_.pop_front();
  return memory;
}

void Toucher::work() {
  while (const BufferPtr memory = next()) {
    for (std::size_t at = 0; at < memory->size() && memory.use_count() > 1 && !stopped_;
         at += kTouchBytes)
      os::touch_pages(memory->data() + at, std::min(kTouchBytes, memory->size() - at));
  }
}

}  // namespace pccl::node
