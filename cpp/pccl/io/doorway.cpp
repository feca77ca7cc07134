#include "pccl/io/doorway.h"

#include <utility>

#include "pccl/base/clock.h"
#include "pccl/io/address.h"
#include "pccl/io/tls.h"

namespace pccl::io {

Doorway::Doorway(asio::io_context& context, Owner owner)
    : context_(context),
      owner_(std::move(owner)),
      acceptor_(context, {[this](int descriptor) { accept(descriptor); }, [this] { owner_.act(); },
                          owner_.free_descriptor,
                          [this](int error_number) {
                            tell(LogLevel::warn,
                                 "cannot accept a connection: " + error_text(error_number));
                          }}) {}

void Doorway::stop() {
  acceptor_.stop();
  for (const auto& [id, handshake] : handshakes_) handshake->cancel();
  handshakes_.clear();
}

// A failure closes this connection and no other.
void Doorway::accept(int descriptor) {
  const std::uint64_t id = next_id();
  try {
    auto socket = std::make_unique<Socket>(context_, descriptor);
    const asio::ip::tcp::endpoint remote = socket->remote();
    if (remote.port() == 0) return;  // the other end is gone already
    std::unique_ptr<Tls> tls;
    if (owner_.tls && (tls = owner_.tls()) == nullptr) return;
    pending_.add(id, remote.address());
    if (tls == nullptr) {
      hand_over(id, std::move(socket));
    } else {
      handshakes_[id] = TlsHandshake::start(
          context_, std::move(socket), std::move(tls), owner_.plain_reply,
          [this, id, from = plain(remote.address()).to_string()](std::unique_ptr<Socket> secured,
                                                                 const Error& failure) {
            handshakes_.erase(id);
            if (secured != nullptr) {
              hand_over(id, std::move(secured));
            } else {
              pending_.remove(id);
              tell(LogLevel::info, "connection from " + from + ": it " + failure.reason);
            }
            owner_.act();
          },
          owner_.plain_prefix);
    }
    make_room();
  } catch (const std::exception& error) {
    fail(id, error);
  }
}

void Doorway::hand_over(std::uint64_t id, std::unique_ptr<Socket> socket) {
  try {
    owner_.accepted(id, std::move(socket));
  } catch (const std::exception& error) {
    fail(id, error);
  }
}

void Doorway::fail(std::uint64_t id, const std::exception& error) {
  forget(id);
  (void)owner_.drop(id, error.what());
  tell(LogLevel::warn, std::string("a new connection was closed: ") + error.what());
}

void Doorway::make_room() {
  while (const auto id = pending_.over_limit()) {
    const std::string from = pending_.address(*id);
    forget(*id);
    if (owner_.drop(*id, "too many other connections wait"))
      tell(LogLevel::warn,
           "too many connections have not identified themselves: closed one from " + from);
  }
}

void Doorway::forget(std::uint64_t id) {
  pending_.remove(id);
  if (const auto handshake = handshakes_.extract(id)) handshake.mapped()->cancel();
}

void Doorway::tell(LogLevel level, const std::string& text) {
  if (!log_enabled(level)) return;
  if (const auto line = rare_.line(text, clock_now())) log(level, owner_.log_name, *line);
}

}  // namespace pccl::io
