#include "pccl/node/master_connection.h"

#include <cerrno>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/io/address.h"

namespace pccl::node {
namespace {

constexpr std::size_t kReadBytes = 64 << 10;
constexpr int kReads = 16;  // in one turn
constexpr io::Connector::Times kDialTimes{.connect = std::chrono::seconds(5)};
// While there are other masters. Together as long as a member may spend at one of them: see
// peer::ControlConnection. The answer to a slower look-up is there for the next dial.
constexpr io::Connector::Times kShortDialTimes{.connect = std::chrono::seconds(2),
                                               .look_up = std::chrono::seconds(1)};

}  // namespace

MasterConnection::MasterConnection(asio::io_context& context, peer::Engine& engine,
                                   const RuntimeOptions& options,
                                   std::shared_ptr<io::TlsContext> tls, std::function<void()> act)
    : context_(context),
      engine_(engine),
      options_(options),
      tls_(std::move(tls)),
      act_(std::move(act)),
      scratch_(kReadBytes) {}

void MasterConnection::dial(std::uint32_t index) {
  if (attempt_) attempt_->cancel();
  at_ = options_.masters.at(index);
  attempt_ = io::Connector::start(
      context_, at_, options_.masters.size() > 1 ? kShortDialTimes : kDialTimes,
      [this](std::unique_ptr<io::Socket> socket, const Error& failure) {
        attempt_.reset();
        connected(std::move(socket), failure);
        act_();
      },
      tls_ == nullptr ? nullptr
                      : tls_->client(io::TlsRole::control, options_.secret.control_key()));
}

void MasterConnection::connected(std::unique_ptr<io::Socket> socket, const Error& failure) {
  if (socket != nullptr) {
    connection_ = {};
    connection_.socket = std::move(socket);
    connection_.socket->try_again_evenly();
    connection_.number = next_number_++;
    engine_.on_control_open(clock_now());
    await_readable();
  } else if (failure.code == Code::authentication_failed) {
    engine_.on_stranger_at_master("the master at " + wire::to_string(at_) + " " + failure.reason,
                                  clock_now());
  } else {
    dial_failure_ = failure.reason;
    engine_.on_control_lost(failure.reason, clock_now());
  }
}

bool MasterConnection::is_open(std::uint64_t number) const {
  return number == connection_.number && connection_.socket != nullptr && !connection_.closing;
}

void MasterConnection::await_readable() {
  connection_.socket->wait_readable(
      [this, number = connection_.number](const asio::error_code& error) {
        if (!error) read(number);
      });
}

void MasterConnection::read(std::uint64_t number) {
  if (!is_open(number)) return;
  const ssize_t result = io::read_available(*connection_.socket, scratch_, kReads,
                                            [&](std::span<const std::uint8_t> bytes) {
                                              engine_.on_control_bytes(bytes, clock_now());
                                              return true;
                                            });
  if (result != -EAGAIN) {
    connection_ = {};
    engine_.on_control_lost(result == 0 ? "the master closed the connection"
                                        : io::error_text(static_cast<int>(-result)),
                            clock_now());
    return act_();
  }
  act_();
  if (is_open(number)) await_readable();
}

void MasterConnection::send(const std::vector<wire::Bytes>& messages) {
  if (messages.empty() || connection_.socket == nullptr) return;  // sent again when it is back
  for (const wire::Bytes& bytes : messages) connection_.out.append(bytes);
  write();
}

void MasterConnection::write() {
  const int result = connection_.out.flush(
      *connection_.socket, [this, number = connection_.number](const asio::error_code& error) {
        if (error || number != connection_.number || connection_.socket == nullptr) return;
        connection_.out.resume();
        write();
        act_();
      });
  // A broken connection stays until it is read: its last message may be unread.
  if (result != -EAGAIN && connection_.closing) connection_ = {};
}

void MasterConnection::finish() {
  if (connection_.socket == nullptr) return;
  // Unread bytes would turn the close into a reset, which may overtake the last message.
  (void)io::read_available(*connection_.socket, scratch_, kReads,
                           [](std::span<const std::uint8_t>) { return true; });
  connection_.closing = true;
  write();
}

void MasterConnection::stop() {
  if (attempt_) attempt_->cancel();
  attempt_.reset();
  connection_.socket.reset();
}

}  // namespace pccl::node
