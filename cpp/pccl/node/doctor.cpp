#include "pccl/node/doctor.h"

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/io/address.h"
#include "pccl/io/connector.h"
#include "pccl/io/handshake.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/link/stripe.h"

#ifndef PCCL_VERSION
#define PCCL_VERSION "unknown"
#endif

namespace pccl::node {
namespace {

constexpr Duration kConnectTime = std::chrono::seconds(5);
constexpr Duration kAnswerTime = std::chrono::seconds(4);
constexpr Duration kContactTime = std::chrono::seconds(2);
constexpr Duration kMeetTime = std::chrono::seconds(4);  // connecting included
constexpr int kQuestions = 5;                            // whose round trips are compared

// A connection to where a member should be, and the question whether it is: other programs may
// listen there, and other hosts have the same private addresses. *one thread: who calls*
class Meeting {
 public:
  // `tls`: for a link to that peer; null: nothing is encrypted.
  Meeting(asio::io_context& context, const PeerId& peer, const wire::Address& address,
          std::unique_ptr<io::Tls> tls)
      : address_(wire::to_string(address)) {
    link::Hello hello;  // of no run: answered at once, and nothing else comes of it
    hello.from = PeerId::random();
    hello.to = peer;
    wire::Writer writer(question_);
    writer(hello);
    attempt_ = io::Connector::start(
        context, address, kContactTime,
        [this](std::unique_ptr<io::Socket> socket, const Error& failure) {
          if (socket == nullptr) {
            const bool known = failure.code == Code::authentication_failed;
            return end(known ? "another listens there: it " + failure.reason : failure.reason);
          }
          socket_ = std::move(socket);
          ask();
        },
        std::move(tls));
  }
  ~Meeting() { attempt_->cancel(); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  [[nodiscard]] bool over() const { return over_; }
  [[nodiscard]] bool met() const { return over_ && failure_.empty(); }
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] std::string failure() const { return address_ + ": " + failure_; }

 private:
  void end(const std::string& failure) {
    over_ = true;
    failure_ = failure;
    socket_.reset();
  }

  void ask() {
    link::FrameHeader header;
    header.type = link::FrameType::hello;
    header.payload_bytes = static_cast<std::uint32_t>(question_.size());
    iovec payload{question_.data(), question_.size()};
    header.checksum = link::checksum(header, {&payload, 1});
    auto first = link::encode(header);
    const std::array<iovec, 2> all{iovec{first.data(), first.size()}, payload};
    if (socket_->write(all) != static_cast<ssize_t>(first.size() + question_.size()))
      return end("the connection broke");
    await_answer();
  }

  void await_answer() {
    socket_->wait_readable([this](const asio::error_code& error) {
      if (error) return;
      std::array<std::uint8_t, 1024> bytes{};
      const iovec into{bytes.data(), bytes.size()};
      const ssize_t got = socket_->read({&into, 1});
      if (got <= 0 && got != -EAGAIN) return end("who listens there closes the connection");
      if (got > 0) answer_.insert(answer_.end(), bytes.begin(), bytes.begin() + got);
      judge();
      if (!over_) await_answer();
    });
  }

  void judge() {
    constexpr std::size_t kHeader = link::kFrameHeaderBytes;
    if (answer_.size() < kHeader) return;
    const auto header = link::decode(std::span(answer_).first<kHeader>());
    if (!header || header->type != link::FrameType::refused)
      return end("who listens there is no pccl peer");
    if (answer_.size() < kHeader + header->payload_bytes) return;
    const std::string_view why(reinterpret_cast<const char*>(answer_.data()) + kHeader,
                               header->payload_bytes);
    end(why == link::kAnotherRun ? "" : "another peer listens there");
  }

  const std::string address_;
  wire::Bytes question_;
  wire::Bytes answer_;
  std::shared_ptr<io::Connector> attempt_;
  std::unique_ptr<io::Socket> socket_;
  bool over_ = false;
  std::string failure_ = "no answer";
};

// *one thread: who calls*
class Doctor {
 public:
  Doctor(const wire::Address& master, std::uint32_t group, const Settings& settings,
         const io::Secret& secret)
      : master_(master), group_(group), settings_(settings), secret_(secret) {}

  Diagnosis run(std::uint16_t port, const std::vector<wire::Address>& advertise) {
    if (!connect()) return std::move(result_);
    result_.round_trip = Duration::max();
    for (int i = 0; i < kQuestions; ++i) {
      const Instant asked = clock_now();
      if (!ask(0)) return std::move(result_);
      result_.round_trip = std::min(result_.round_trip, clock_now() - asked);
    }
    listen(port);
    if (result_.port != 0 && !ask_who_reaches_us(advertise)) return std::move(result_);
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
    socket_.reset();
    reader_ = wire::FrameReader();
    if (secret_ && tls_ == nullptr) {
      auto made = io::TlsContext::make(settings_.key_update_records);
      if (!made) {
        result_.failure = made.error().reason;
        return false;
      }
      tls_ = std::move(*made);
    }
    bool over = false;
    const auto attempt = io::Connector::start(
        context_, master_, kConnectTime,
        [&](std::unique_ptr<io::Socket> socket, const Error& failure) {
          over = true;
          socket_ = std::move(socket);
          result_.failure = failure.reason;
        },
        secret_ ? tls_->client(io::TlsRole::control, secret_.control_key()) : nullptr);
    drive(kConnectTime + io::kTlsTimeout + std::chrono::seconds(1), [&] { return over; });
    attempt->cancel();
    if (socket_ == nullptr) {
      if (result_.failure.empty()) result_.failure = "no answer";
      return false;
    }
    result_.address = io::to_string(socket_->remote());
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
        run_ = answer->envelope.run;
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

  // At the address that the master sees, since no other is tried for anybody: the first port that
  // is advertised there, and our own.
  bool ask_who_reaches_us(const std::vector<wire::Address>& advertise) {
    std::uint16_t forwarded = 0;
    for (const wire::Address& address : advertise) {
      const std::uint16_t port = address.port == 0 ? result_.port : address.port;
      if (!leads_to(address, result_.findings.seen) || (forwarded != 0 && port != forwarded)) {
        result_.untested.push_back(wire::to_string({address.host, port}));
      } else {
        forwarded = port;
      }
    }
    if (forwarded != 0 && forwarded != result_.port) {
      if (!ask_about(forwarded)) return false;
      if (result_.findings.attempt.reached == wire::Reached::yes) return true;
      if (!connect()) return false;  // one port is tried for each connection
    }
    return ask_about(result_.port);
  }

  bool ask_about(std::uint16_t port) {
    const std::vector<wire::Attempt> before = std::move(result_.findings.attempts);
    if (!ask(port)) return false;
    result_.asked = port;
    std::vector<wire::Attempt>& attempts = result_.findings.attempts;
    for (const wire::Attempt& attempt : before) {
      if (attempt.reached != wire::Reached::yes) continue;
      std::erase_if(attempts, [&](const wire::Attempt& a) { return a.peer == attempt.peer; });
      attempts.push_back(attempt);
    }
    return true;
  }

  // Whether that is one of the host's addresses.
  static bool leads_to(const wire::Address& address, const std::string& seen) {
    if (const auto numeric = io::numeric_endpoint(address))
      return io::plain(numeric->address()).to_string() == seen;
    asio::io_context context;
    asio::ip::tcp::resolver resolver(context);
    asio::error_code error;
    for (const auto& found : resolver.resolve(address.host, "", error)) {
      if (io::plain(found.endpoint().address()).to_string() == seen) return true;
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
    const auto descriptor = io::listen_at({settings_.bind_address, port});
    if (!descriptor) {
      result_.port_failure = descriptor.error().reason;
      return;
    }
    listener_ = std::make_unique<io::Socket>(context_, *descriptor);
    result_.port = listener_->local().port();
  }

  // All at once, at all of their addresses. REQUIRES: nobody else asks who reaches us: what listens
  // here is closed, so that it is not taken for a member.
  void contact_members() {
    listener_.reset();
    std::vector<std::vector<std::unique_ptr<Meeting>>> meetings;
    for (const wire::Member& member : result_.findings.members) {
      auto& all = meetings.emplace_back();
      for (const wire::Address& address : member.addresses) {
        auto tls = tls_ == nullptr
                       ? nullptr
                       : tls_->client(io::TlsRole::link, secret_.link_key(run_, member.id));
        all.push_back(std::make_unique<Meeting>(context_, member.id, address, std::move(tls)));
      }
    }
    drive(kMeetTime, [&] {
      return std::all_of(meetings.begin(), meetings.end(), [](const auto& all) {
        return std::all_of(all.begin(), all.end(), [](const auto& one) { return one->over(); });
      });
    });
    for (std::size_t i = 0; i < meetings.size(); ++i) {
      Contact contact{result_.findings.members[i].id, {}, {}};
      for (const auto& one : meetings[i]) {
        if (contact.address.empty() && one->met()) contact.address = one->address();
        // Of the first address: the last ones are those that mean this host.
        if (contact.reason.empty() && !one->met()) contact.reason = one->failure();
      }
      result_.contacts.push_back(std::move(contact));
    }
  }

  wire::Address master_;
  std::uint32_t group_;
  const Settings& settings_;
  const io::Secret& secret_;
  asio::io_context context_;
  std::shared_ptr<io::TlsContext> tls_;  // null: there is no secret
  std::uint64_t run_ = 0;                // what the master says it is
  std::unique_ptr<io::Socket> socket_;
  std::unique_ptr<io::Socket> listener_;  // the kernel accepts; nobody has to look
  wire::FrameReader reader_;
  Diagnosis result_;
};

}  // namespace

Diagnosis diagnose(const wire::Address& master, std::uint32_t group, std::uint16_t port,
                   const std::vector<wire::Address>& advertise, const Settings& settings,
                   const io::Secret& secret) {
  return Doctor(master, group, settings, secret).run(port, advertise);
}

}  // namespace pccl::node
