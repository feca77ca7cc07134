#include "pccl/node/visitor.h"

#include <array>
#include <cerrno>
#include <optional>
#include <utility>

#include "pccl/io/address.h"
#include "pccl/io/connector.h"
#include "pccl/io/tls_handshake.h"

namespace pccl::node {
namespace {

constexpr io::Connector::Times kTimes{.connect = std::chrono::seconds(5)};
constexpr Duration kReplyTime = std::chrono::seconds(4);

}  // namespace

void read_all(io::Socket& socket, const std::function<bool(std::span<const std::uint8_t>)>& take,
              const std::function<void()>& ended) {
  socket.wait_readable([&socket, take, ended](const asio::error_code& error) {
    if (error) return;
    std::array<std::uint8_t, 4096> buffer{};
    bool more = true;
    const ssize_t result = io::read_available(
        socket, buffer, 1, [&](std::span<const std::uint8_t> bytes) { return more = take(bytes); });
    if (!more) return;  // the socket may be gone
    if (result != -EAGAIN) return ended();
    read_all(socket, take, ended);
  });
}

Status Visitor::connect() {
  socket_.reset();
  reader_ = wire::FrameReader();
  if (secret_ && tls_ == nullptr) {
    auto made = io::TlsContext::make(io::TlsOptions(settings_));
    if (!made) return made.error();
    tls_ = std::move(*made);
  }
  std::optional<Error> failure;
  const auto attempt = io::Connector::start(
      context_, master_, kTimes,
      [&](std::unique_ptr<io::Socket> socket, const Error& why) {
        failure = why;
        socket_ = std::move(socket);
      },
      secret_ ? tls_->client(io::TlsRole::control, secret_.control_key()) : nullptr);
  drive(kTimes.look_up + kTimes.connect + io::kTlsTimeout + std::chrono::seconds(1),
        [&] { return failure.has_value(); });
  attempt->cancel();
  if (socket_ != nullptr) return {};
  if (!failure) return Status(Code::unreachable, "no answer");
  if (failure->code != Code::authentication_failed)
    return Status(Code::unreachable, failure->reason);
  return Status(failure->code, wire::to_string(master_) + ": " + failure->reason);
}

std::string Visitor::address() const { return io::to_string(socket_->remote()); }

Status Visitor::say(const wire::Message& message) {
  const wire::Bytes bytes = wire::encode({}, message);
  if (socket_->write(bytes) == static_cast<ssize_t>(bytes.size())) return {};
  return Status(Code::unreachable, "the connection broke");
}

Result<wire::Frame> Visitor::hear(Duration most) {
  wire::Frame frame;
  Result<bool> next = reader_.next(frame);
  bool broken = false;
  if (next && !*next) {
    read_all(
        *socket_,
        [&](std::span<const std::uint8_t> bytes) {
          reader_.feed(bytes);
          next = reader_.next(frame);
          return next && !*next;
        },
        [&] { broken = true; });
    drive(most, [&] { return !next || *next || broken; });
  }
  if (!next) return {Code::refused, next.error().reason};
  if (!*next) return {Code::unreachable, broken ? "the master closed the connection" : "no answer"};
  if (const auto* refused = std::get_if<wire::Refused>(&frame.message))
    return {refused->code, refused->reason};
  return frame;
}

Result<wire::RunStatus> ask_status(const wire::Address& master, const Settings& settings,
                                   const io::Secret& secret) {
  Visitor visitor(master, settings, secret);
  if (const Status there = visitor.connect(); !there) return there.error();
  if (const Status said = visitor.say(wire::AskStatus{}); !said) return said.error();
  wire::Bytes bytes;
  for (bool last = false; !last;) {
    const Result<wire::Frame> frame = visitor.hear(kReplyTime);
    if (!frame) return frame.error();
    const auto* part = std::get_if<wire::StatusPart>(&frame->message);
    if (part == nullptr || bytes.size() > wire::kMaxPayload)
      return {Code::refused, "the master does not answer with a status"};
    bytes.insert(bytes.end(), part->bytes.begin(), part->bytes.end());
    last = part->last;
  }
  wire::RunStatus status;
  wire::Reader reader(bytes);
  reader(status);
  if (!reader.complete()) return {Code::refused, "the master's status is malformed"};
  return status;
}

Result<std::string> command(const wire::Address& master, const wire::Command& command,
                            const Settings& settings, const io::Secret& secret) {
  Visitor visitor(master, settings, secret);
  if (const Status there = visitor.connect(); !there) return there.error();
  if (const Status said = visitor.say(command); !said) return said.error();
  const Result<wire::Frame> frame = visitor.hear(kReplyTime);
  if (!frame) return frame.error();
  const auto* result = std::get_if<wire::CommandResult>(&frame->message);
  if (result == nullptr) return {Code::refused, "the master does not answer with a result"};
  if (!result->done) return {Code::invalid_argument, result->text};
  return result->text;
}

}  // namespace pccl::node
