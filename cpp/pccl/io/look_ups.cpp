#include "pccl/io/look_ups.h"

#include <algorithm>
#include <asio/post.hpp>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>

#include "pccl/io/thread.h"

namespace pccl::io {
namespace {

constexpr unsigned kMaxThreads = 8;  // of one loop

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
    std::uint64_t number;
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
  waiting_[number] = std::move(done);
  const std::lock_guard lock(shared_->mutex);
  shared_->questions.push_back({number, address});
  if (shared_->threads >= kMaxThreads) return number;
  try {
    start_thread([shared = shared_] { work(shared); }).detach();
    ++shared_->threads;
  } catch (const std::system_error& error) {
    if (shared_->threads > 0) return number;  // these come to it
    shared_->questions.pop_back();
    answer(*shared_, number, {error.code().message(), {}});
  }
  return number;
}

void LookUps::cancel(std::uint64_t number) {
  const auto done = waiting_.extract(number);  // ends after the lock
  const std::lock_guard lock(shared_->mutex);
  std::erase_if(shared_->questions,
                [&](const Shared::Question& question) { return question.number == number; });
}

void LookUps::work(const std::shared_ptr<Shared>& shared) {
  std::unique_lock lock(shared->mutex);
  while (!shared->questions.empty()) {
    const Shared::Question question = std::move(shared->questions.front());
    shared->questions.pop_front();
    lock.unlock();
    Answer found = look_up(question.address);
    lock.lock();
    answer(*shared, question.number, std::move(found));
  }
  --shared->threads;
}

// REQUIRES: the mutex. The loop cannot end meanwhile.
void LookUps::answer(Shared& shared, std::uint64_t number, Answer answer) {
  if (shared.context == nullptr) return;
  asio::post(*shared.context,
             [context = shared.context, number, answer = std::move(answer)]() mutable {
               const auto done = of(*context).waiting_.extract(number);
               if (done) done.mapped()(answer);
             });
}

void LookUps::shutdown() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->context = nullptr;
    shared_->questions.clear();
  }
  waiting_.clear();
}

}  // namespace pccl::io
