#include "pccl/io/acceptor.h"

#include <cerrno>

namespace pccl::io {
namespace {

constexpr int kAccepts = 64;  // in one turn
constexpr Duration kPause = std::chrono::milliseconds(100);

}  // namespace

void Acceptor::start(int descriptor) {
  listener_ = std::make_unique<Socket>(context_, descriptor);
  resume();
}

void Acceptor::stop() {
  listener_.reset();
  timer_.cancel();
}

void Acceptor::resume() {
  if (waiting_ || listener_ == nullptr) return;
  waiting_ = true;
  listener_->wait_readable([this, alive = std::weak_ptr(alive_)](const asio::error_code& error) {
    if (error || alive.expired() || listener_ == nullptr) return;
    waiting_ = false;
    turn();
    events_.turn_ended();
  });
}

void Acceptor::turn() {
  for (int i = 0; i < kAccepts; ++i) {
    const int descriptor = accept_on(*listener_);
    if (descriptor >= 0) {
      events_.accepted(descriptor);
      continue;
    }
    if (descriptor == -EAGAIN) break;
    const bool none_left = descriptor == -EMFILE || descriptor == -ENFILE;
    if (none_left && events_.free_descriptor && events_.free_descriptor()) continue;
    waiting_ = true;
    timer_.expires_after(kPause);
    timer_.async_wait([this, alive = std::weak_ptr(alive_)](const asio::error_code& error) {
      if (error || alive.expired()) return;
      waiting_ = false;
      resume();
    });
    if (events_.paused) events_.paused(-descriptor);
    return;
  }
  resume();
}

}  // namespace pccl::io
