#include "pccl/peer/doctor.h"

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "pccl/net/address.h"
#include "pccl/net/connector.h"
#include "pccl/net/handshake.h"
#include "pccl/net/socket.h"
#include "pccl/net/tls.h"

#ifndef PCCL_VERSION
#define PCCL_VERSION "unknown"
#endif

namespace pccl::peer {
namespace {

constexpr Duration kConnectTime = std::chrono::seconds(5);
constexpr Duration kAnswerTime = std::chrono::seconds(4);
constexpr Duration kContactTime = std::chrono::seconds(2);
constexpr int kQuestions = 5;  // whose round trips are compared

Instant clock_now() { return std::chrono::steady_clock::now(); }

// *one thread: who calls*
class Doctor {
 public:
  Doctor(const wire::Address& master, std::uint32_t group, const Settings& settings,
         const net::Secret& secret)
      : master_(master), group_(group), settings_(settings), secret_(secret) {}

  Diagnosis run(std::uint16_t port) {
    if (!connect()) return std::move(result_);
    result_.round_trip = Duration::max();
    for (int i = 0; i < kQuestions; ++i) {
      const Instant asked = clock_now();
      if (!ask(0)) return std::move(result_);
      result_.round_trip = std::min(result_.round_trip, clock_now() - asked);
    }
    listen(port);
    if (result_.port != 0 && !ask(result_.port)) return std::move(result_);
    contact_members();
    return std::move(result_);
  }

 private:
  // Lets things happen until `over`, or the time has passed.
  template <class Over>
  void drive(Duration most, Over over) {
    const Instant until = clock_now() + most;
    context_.restart();
    while (!over() && clock_now() < until) context_.run_one_until(until);
  }

  bool connect() {
    std::unique_ptr<net::Tls> tls;
    if (secret_) {
      auto made = net::TlsContext::make(settings_.key_update_records);
      if (!made) {
        result_.failure = made.error().reason;
        return false;
      }
      tls = (*made)->client(net::TlsRole::control, secret_.control_key());
    }
    bool over = false;
    const auto attempt = net::Connector::start(
        context_, master_, kConnectTime,
        [&](std::unique_ptr<net::Socket> socket, const Error& failure) {
          over = true;
          socket_ = std::move(socket);
          result_.failure = failure.reason;
        },
        std::move(tls));
    drive(kConnectTime + net::kTlsTimeout + std::chrono::seconds(1), [&] { return over; });
    attempt->cancel();
    if (socket_ == nullptr) {
      if (result_.failure.empty()) result_.failure = "no answer";
      return false;
    }
    result_.address = net::to_string(socket_->remote());
    return true;
  }

  // Into result_.findings, or result_.failure.
  bool ask(std::uint16_t port) {
    const wire::Bytes question =
        wire::encode({}, wire::Inquiry{group_, port, std::string("pccl ") + PCCL_VERSION});
    const iovec from{const_cast<std::uint8_t*>(question.data()), question.size()};
    if (socket_->write({&from, 1}) != static_cast<ssize_t>(question.size())) {
      result_.failure = "the connection broke";
      return false;
    }
    std::optional<wire::Frame> answer;
    bool broken = false;
    await_answer(answer, broken);
    drive(kAnswerTime, [&] { return answer.has_value() || broken; });
    if (answer) {
      if (auto* findings = std::get_if<wire::Findings>(&answer->message)) {
        result_.findings = std::move(*findings);
        return true;
      }
      const auto* refused = std::get_if<wire::Refused>(&answer->message);
      result_.failure = refused == nullptr ? "this is no pccl master" : refused->reason;
    } else if (result_.failure.empty()) {
      result_.failure = broken ? "the master closed the connection" : "no answer";
    }
    return false;
  }

  void await_answer(std::optional<wire::Frame>& answer, bool& broken) {
    socket_->wait_readable([this, &answer, &broken](const asio::error_code& error) {
      if (error) return;
      std::array<std::uint8_t, 4096> bytes{};
      const iovec into{bytes.data(), bytes.size()};
      const ssize_t got = socket_->read({&into, 1});
      if (got <= 0 && got != -EAGAIN) {
        broken = true;
        return;
      }
      if (got > 0) reader_.feed(std::span(bytes).first(static_cast<std::size_t>(got)));
      wire::Frame frame;
      const Result<bool> next = reader_.next(frame);
      if (!next) {
        result_.failure = next.error().reason;
        broken = true;
      } else if (*next) {
        answer = std::move(frame);
      } else {
        await_answer(answer, broken);
      }
    });
  }

  void listen(std::uint16_t port) {
    asio::ip::tcp::endpoint where;
    const auto bound = net::numeric_endpoint({settings_.bind_address, port});
    const auto descriptor = bound ? net::listen_on(*bound) : net::listen_everywhere(port);
    if (!descriptor) {
      result_.port_failure = descriptor.error().reason;
      return;
    }
    listener_ = std::make_unique<net::Socket>(context_, *descriptor);
    result_.port = listener_->local().port();
  }

  // All at once, at all of their addresses.
  void contact_members() {
    std::vector<std::shared_ptr<net::Connector>> attempts;
    std::size_t open = 0;
    result_.contacts.resize(result_.findings.members.size());
    for (std::size_t i = 0; i < result_.contacts.size(); ++i) {
      const wire::Member& member = result_.findings.members[i];
      result_.contacts[i].peer = member.id;
      for (const wire::Address& address : member.addresses) {
        ++open;
        attempts.push_back(net::Connector::start(
            context_, address, kContactTime,
            [this, i, address, &open](const std::unique_ptr<net::Socket>& socket,
                                      const Error& failure) {
              --open;
              Contact& contact = result_.contacts[i];
              if (socket == nullptr) {
                contact.reason = net::to_string(address) + ": " + failure.reason;
              } else if (contact.address.empty()) {
                contact.address = net::to_string(address);
              }
            }));
      }
    }
    drive(kContactTime + std::chrono::seconds(1), [&] { return open == 0; });
    for (const auto& attempt : attempts) attempt->cancel();
  }

  wire::Address master_;
  std::uint32_t group_;
  const Settings& settings_;
  const net::Secret& secret_;
  asio::io_context context_;
  std::unique_ptr<net::Socket> socket_;
  std::unique_ptr<net::Socket> listener_;  // the kernel accepts; nobody has to look
  wire::FrameReader reader_;
  Diagnosis result_;
};

}  // namespace

Diagnosis diagnose(const wire::Address& master, std::uint32_t group, std::uint16_t port,
                   const Settings& settings, const net::Secret& secret) {
  return Doctor(master, group, settings, secret).run(port);
}

}  // namespace pccl::peer
