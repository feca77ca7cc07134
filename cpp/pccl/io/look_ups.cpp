#include "pccl/io/look_ups.h"

#include <algorithm>
#include <asio/post.hpp>
#include <chrono>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/io/thread.h"
#include "pccl/wire/address.h"

namespace pccl::io {
namespace {

constexpr unsigned kMaxThreads = 8;  // of one loop
constexpr Duration kKept = std::chrono::seconds(30);

LookUps::Answer look_up(const wire::Address& address) {
  LookUps::Answer answer;
  try {
    asio::io_context context;  // starts no thread, since the call blocks
    asio::ip::tcp::resolver resolver(context);
    for (const auto& result : resolver.resolve(address.host, std::to_string(address.port),
                                               asio::ip::tcp::resolver::numeric_service))
      answer.endpoints.push_back(result.endpoint());
  } catch (const std::system_error& error) {
    answer.failure = error.code().message();
  } catch (const std::exception& error) {
    answer.failure = error.what();
  }
  return answer;
}

}  // namespace

asio::execution_context::id LookUps::id;

// The part that the threads use, also after the end of the loop. *any thread, with the mutex*
struct LookUps::Shared {
  struct Question {
    std::string name;
    wire::Address address;
  };
  std::mutex mutex;
  asio::io_context* context;  // null: the loop has ended
  std::deque<Question> questions;
  unsigned threads = 0;
};

LookUps::LookUps(asio::io_context& context)
    : asio::execution_context::service(context),
      context_(context),
      shared_(std::make_shared<Shared>()) {
  shared_->context = &context;
}

std::uint64_t LookUps::start(const wire::Address& address, Done done) {
  const std::uint64_t number = next_++;
  const std::string text = wire::to_string(address);
  std::erase_if(names_, [&](const Names::value_type& item) {
    return item.second.kept && clock_now() - item.second.kept_at > kKept;
  });
  Name& name = names_[text];
  name.waiting[number] = std::move(done);
  if (const auto kept = std::exchange(name.kept, nullptr)) {
    name.runs = true;
    asio::post(context_, [this, text, answer = *kept] { on_answer(text, answer); });
  } else if (!std::exchange(name.runs, true)) {
    ask(text, address);
  }
  return number;
}

void LookUps::ask(const std::string& text, const wire::Address& address) {
  const std::lock_guard lock(shared_->mutex);
  shared_->questions.push_back({text, address});
  if (shared_->threads >= kMaxThreads) return;
  try {
    start_thread([shared = shared_] { work(shared); }).detach();
    ++shared_->threads;
  } catch (const std::system_error& error) {
    if (shared_->threads > 0) return;  // these come to it
    shared_->questions.pop_back();
    tell(*shared_, text, {error.code().message(), {}});
  }
}

void LookUps::cancel(std::uint64_t number) {
  for (auto it = names_.begin(); it != names_.end(); ++it) {
    const auto done = it->second.waiting.extract(number);  // ends after the lock
    if (!done) continue;
    if (!it->second.waiting.empty()) return;
    const std::lock_guard lock(shared_->mutex);
    const std::size_t before =
        std::erase_if(shared_->questions,
                      [&](const Shared::Question& question) { return question.name == it->first; });
    if (before > 0) names_.erase(it);  // no thread had begun
    return;
  }
}

// Runs in threads that nothing waits for.
void LookUps::work(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->questions.empty()) {
    const Shared::Question question = std::move(shared->questions.front());
    shared->questions.pop_front();
    lock.unlock();
    Answer found = look_up(question.address);
    lock.lock();
    try {
      tell(*shared, question.name, std::move(found));
    } catch (const std::bad_alloc&) {  // those who wait have a time of their own
    }
  }
  --shared->threads;
}

// REQUIRES: the mutex. The loop cannot end meanwhile.
void LookUps::tell(Shared& shared, const std::string& name, Answer answer) {
  if (shared.context == nullptr) return;
  asio::post(*shared.context, [context = shared.context, name, answer = std::move(answer)] {
    of(*context).on_answer(name, answer);
  });
}

void LookUps::on_answer(const std::string& text, const Answer& answer) {
  const auto it = names_.find(text);
  if (it == names_.end()) return;
  Name& name = it->second;
  name.runs = false;
  const std::map<std::uint64_t, Done> waiting = std::exchange(name.waiting, {});
  if (waiting.empty() && answer.failure.empty()) {
    name.kept = std::make_unique<Answer>(answer);
    name.kept_at = clock_now();
  } else {
    names_.erase(it);
  }
  for (const auto& [number, done] : waiting) done(answer);
}

void LookUps::shutdown() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->context = nullptr;
    shared_->questions.clear();
  }
  names_.clear();
}

}  // namespace pccl::io
