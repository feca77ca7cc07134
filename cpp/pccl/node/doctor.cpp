#include "pccl/node/doctor.h"

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <memory>
#include <span>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/version.h"
#include "pccl/io/address.h"
#include "pccl/io/connector.h"
#include "pccl/io/socket.h"
#include "pccl/io/tls.h"
#include "pccl/link/stripe.h"
#include "pccl/node/visitor.h"

namespace pccl::node {
namespace {

constexpr Duration kAnswerTime = std::chrono::seconds(4);
constexpr Duration kContactTime = std::chrono::seconds(2);
constexpr Duration kProbeTime = std::chrono::seconds(4);  // connecting included
constexpr int kQuestions = 5;                             // whose round trips are compared

using Bytes = std::span<const std::uint8_t>;

// Connects to an address of a member, and asks whether it is this member: other programs may listen
// there, and other hosts may have the same private address. *one thread: the caller's*
class MemberProbe {
 public:
  // `tls`: for a link to that peer; null: nothing is encrypted.
  MemberProbe(asio::io_context& context, const PeerId& peer, const wire::Address& address,
              std::unique_ptr<io::Tls> tls)
      : address_(wire::to_string(address)) {
    link::Hello hello;  // of no run: refused at once, without any effect
    hello.from = PeerId::random();
    hello.to = peer;
    question_ = link::make_checked_frame({.type = link::FrameType::hello}, wire::encoded(hello));
    attempt_ = io::Connector::start(
        context, address, {.connect = kContactTime, .look_up = kContactTime},
        [this](std::unique_ptr<io::Socket> socket, const Error& failure) {
          if (socket == nullptr) {
            const bool stranger = failure.code == Code::authentication_failed;
            return end(stranger ? "another program listens there: it " + failure.reason
                                : failure.reason);
          }
          socket_ = std::move(socket);
          ask();
        },
        std::move(tls));
  }
  ~MemberProbe() { attempt_->cancel(); }
  MemberProbe(const MemberProbe&) = delete;
  MemberProbe& operator=(const MemberProbe&) = delete;

  [[nodiscard]] bool over() const { return over_; }
  [[nodiscard]] bool found() const { return over_ && failure_.empty(); }
  [[nodiscard]] const std::string& address() const { return address_; }
  [[nodiscard]] std::string failure() const { return address_ + ": " + failure_; }

 private:
  void end(const std::string& failure) {
    over_ = true;
    failure_ = failure;
    socket_.reset();
  }

  void ask() {
    auto& header = question_.header;
    wire::Bytes& payload = question_.owned;
    const std::array<iovec, 2> all{iovec{header.data(), header.size()},
                                   iovec{payload.data(), payload.size()}};
    if (socket_->write(all) != static_cast<ssize_t>(header.size() + payload.size()))
      return end("the connection broke");
    read_all(
        *socket_,
        [this](Bytes bytes) {
          answer_.insert(answer_.end(), bytes.begin(), bytes.end());
          judge();
          return !over_;
        },
        [this] { end("the program that listens there closes the connection"); });
  }

  void judge() {
    constexpr std::size_t kHeader = link::kFrameHeaderBytes;
    if (answer_.size() < kHeader) return;
    const auto header = link::decode(std::span(answer_).first<kHeader>());
    if (!header || header->type != link::FrameType::refused)
      return end("the program that listens there is no pccl peer");
    if (answer_.size() < kHeader + header->payload_bytes) return;
    const std::string_view why(reinterpret_cast<const char*>(answer_.data()) + kHeader,
                               header->payload_bytes);
    end(why == link::kAnotherRun ? "" : "another peer listens there");
  }

  const std::string address_;
  link::OutgoingFrame question_;
  wire::Bytes answer_;
  std::shared_ptr<io::Connector> attempt_;
  std::unique_ptr<io::Socket> socket_;
  bool over_ = false;
  std::string failure_ = "no answer";
};

// *one thread: the caller's*
class Doctor {
 public:
  Doctor(const wire::Address& master, std::uint32_t group, const Settings& settings,
         const io::Secret& secret)
      : group_(group), settings_(settings), secret_(secret), master_(master, settings, secret) {}

  Diagnosis run(std::uint16_t port, const std::vector<wire::Address>& advertise) {
    examine(port, advertise);
    return std::move(result_);
  }

 private:
  // Ends early after a failure, which is in result_.failure.
  void examine(std::uint16_t port, const std::vector<wire::Address>& advertise) {
    if (!connect()) return;
    result_.round_trip = Duration::max();
    for (int i = 0; i < kQuestions; ++i) {
      const Instant asked = clock_now();
      if (!ask(0)) return;
      result_.round_trip = std::min(result_.round_trip, clock_now() - asked);
    }
    listen(port);
    if (result_.port != 0 && !ask_who_reaches_us(advertise)) return;
    contact_members();
  }

  bool fail(const std::string& reason) {
    if (result_.failure.empty()) result_.failure = reason;
    return false;
  }

  bool connect() {
    if (const Status there = master_.connect(); !there) return fail(there.error().reason);
    result_.address = master_.address();
    return true;
  }

  // Asks the master, for result_.findings. `port`: to be reached there from outside; 0: none.
  bool ask(std::uint16_t port) {
    const wire::Inquiry question{group_, port, kSoftware};
    if (const Status said = master_.say(question); !said) return fail(said.error().reason);
    Result<wire::Frame> answer = master_.hear(kAnswerTime);
    if (!answer) return fail(answer.error().reason);
    auto* findings = std::get_if<wire::Findings>(&answer->message);
    if (findings == nullptr) return fail("this is no pccl master");
    run_ = answer->envelope.run;
    result_.findings = std::move(*findings);
    return true;
  }

  // Master and members try to reach this host at the address that the master sees, and at no other.
  // Asks for the first port that is advertised there, and then for the port of this host.
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

  // Whether `seen` is one of the host's addresses.
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

  void listen(std::uint16_t port) {
    const auto descriptor = io::listen_at({settings_.bind_address, port});
    if (!descriptor) {
      result_.port_failure = descriptor.error().reason;
      return;
    }
    listener_ = std::make_unique<io::Socket>(master_.context(), *descriptor);
    result_.port = listener_->local().port();
  }

  // Tries all addresses of all members at once. Closes the listener first, so that it is not taken
  // for a member.
  void contact_members() {
    listener_.reset();
    std::vector<std::vector<std::unique_ptr<MemberProbe>>> probes;
    for (const wire::Member& member : result_.findings.members) {
      auto& all = probes.emplace_back();
      for (const wire::Address& address : member.addresses) {
        io::TlsContext* const with = master_.tls();
        auto tls = with == nullptr
                       ? nullptr
                       : with->client(io::TlsRole::link, secret_.link_key(run_, member.id));
        all.push_back(
            std::make_unique<MemberProbe>(master_.context(), member.id, address, std::move(tls)));
      }
    }
    master_.drive(kProbeTime, [&] {
      return std::all_of(probes.begin(), probes.end(), [](const auto& all) {
        return std::all_of(all.begin(), all.end(), [](const auto& one) { return one->over(); });
      });
    });
    for (std::size_t i = 0; i < probes.size(); ++i) {
      Contact contact{result_.findings.members[i].id, {}, {}};
      for (const auto& one : probes[i]) {
        if (contact.address.empty() && one->found()) contact.address = one->address();
        // The first address's failure: the last addresses often mean this host.
        if (contact.reason.empty() && !one->found()) contact.reason = one->failure();
      }
      result_.contacts.push_back(std::move(contact));
    }
  }

  std::uint32_t group_;
  const Settings& settings_;
  const io::Secret& secret_;
  Visitor master_;
  std::uint64_t run_ = 0;                 // as the master says
  std::unique_ptr<io::Socket> listener_;  // the kernel accepts; no code has to
  Diagnosis result_;
};

}  // namespace

Diagnosis diagnose(const wire::Address& master, std::uint32_t group, std::uint16_t port,
                   const std::vector<wire::Address>& advertise, const Settings& settings,
                   const io::Secret& secret) {
  return Doctor(master, group, settings, secret).run(port, advertise);
}

}  // namespace pccl::node
