#include "pccl/server/server.h"

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/log.h"
#include "pccl/io/address.h"
#include "pccl/io/thread.h"

namespace pccl::server {
namespace {

constexpr std::size_t kMaxQueued = 64 << 20;      // bytes that one peer has not read yet
constexpr std::size_t kMaxQueuedAll = 512 << 20;  // bytes that all peers have not read yet
constexpr std::size_t kMaxHeldAll = 512 << 20;    // bytes of members' incomplete messages
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kReadBytes = 64 << 10;
constexpr int kReads = 16;  // from one connection in one turn
constexpr Duration kTryTime = std::chrono::seconds(2);
constexpr Duration kCloseGrace = std::chrono::seconds(1);

master::Options options_from(const Settings& settings, std::uint32_t min_peers, bool encrypted,
                             master::MasterPlace place) {
  master::Options options;
  options.place = place;
  options.min_peers = min_peers;
  options.heartbeat_interval = settings.heartbeat_interval;
  options.heartbeat_timeout = settings.heartbeat_timeout;
  options.reconnect_timeout = settings.reconnect_timeout;
  options.straggler_timeout = settings.straggler_timeout;
  options.replan_interval = settings.replan_interval;
  options.measure_after = settings.measure_after;
  options.segment_bytes = static_cast<std::uint32_t>(settings.segment_bytes);
  options.relays = settings.relay;
  options.encrypted = encrypted;
  return options;
}

// The first bytes of a connection that is to be relayed: a header's magic number, version and type.
// They are not encrypted, even with a secret.
wire::Bytes relay_prefix() {
  wire::Bytes whole = wire::encode({}, wire::OpenRelay{});
  whole.resize(6);
  return whole;
}

std::uint64_t random_run() {
  std::uint64_t run = 0;
  while (run == 0) std::memcpy(&run, PeerId::random().bytes.data(), sizeof run);
  return run;
}

// The answer to a peer without a secret, if the master has one. It reveals nothing about the run.
wire::Bytes ask_for_secret() {
  return wire::encode(
      wire::Envelope{},
      wire::Refused{Code::authentication_failed,
                    "this run needs its secret: set PCCL_SECRET or PCCL_SECRET_FILE"});
}

}  // namespace

Server::Server(wire::Address listen, const Settings& settings, io::Secret secret,
               std::uint32_t min_peers, master::MasterPlace place)
    : listen_(std::move(listen)),
      options_(options_from(settings, min_peers, static_cast<bool>(secret), place)),
      secret_(std::move(secret)),
      tls_options_(settings),
      master_(options_, random_run(), 1),
      relays_(context_, settings.relay_rate, io::descriptor_share(io::kMaxPending) / 2),
      doorway_(context_, doorway_owner()),
      timer_(context_),
      newcomers_(kNoLimit, kNoLimit, io::kMaxPendingBytes),
      scratch_(kReadBytes) {}

Server::~Server() { interrupt(); }

Status Server::run() {
  if (secret_) {
    auto tls = io::TlsContext::make(tls_options_);
    if (!tls) return tls.error();
    tls_ = std::move(*tls);
  }
  const auto listener = io::listen_at(listen_);
  if (!listener) return listener.error();
  doorway_.start(*listener);
  const auto bound = doorway_.listener().local();
  address_ = io::to_string(bound);
  if (!secret_ && !bound.address().is_loopback()) {
    log(LogLevel::warn, "master",
        "any host that reaches " + address_ +
            " can join, and nothing is encrypted: this master has no secret (PCCL_SECRET)");
  }
  arm_timer();
  const std::lock_guard lock(mutex_);
  thread_ = io::start_thread([this] { serve(); });
  running_ = true;
  return {};
}

void Server::serve() {
  for (;;) {
    try {
      // A handler that failed may have left these undone.
      doorway_.resume();
      act();
      context_.run();
      break;
    } catch (const std::exception& error) {
      // Memory or descriptors ran out for one connection: the others continue.
      log(LogLevel::err, "master", std::string("an event failed: ") + error.what());
    }
  }
  doorway_.stop();
  for (const auto& [id, attempt] : tries_) attempt->cancel();
  tries_.clear();
  relays_.stop();
  connections_.clear();
  const std::lock_guard lock(mutex_);
  running_ = false;
  ended_.notify_all();
}

void Server::interrupt() {
  context_.stop();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return !running_; });
  if (thread_.joinable()) thread_.join();  // the thread is about to end
}

bool Server::wait(Instant until) {
  std::unique_lock lock(mutex_);
  return ended_.wait_until(lock, until, [&] { return !running_; });
}

Result<wire::RunStatus> Server::status() {
  struct Answer {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<wire::RunStatus> status;
  };
  const auto answer = std::make_shared<Answer>();
  asio::post(context_, [this, answer] {
    wire::RunStatus status = master_.status(clock_now());
    const std::lock_guard lock(answer->mutex);
    answer->status = std::move(status);
    answer->changed.notify_all();
  });
  std::unique_lock lock(answer->mutex);
  while (!answer->status) {
    if (answer->changed.wait_for(lock, std::chrono::milliseconds(50),
                                 [&] { return answer->status.has_value(); }))
      break;
    const std::lock_guard running(mutex_);
    if (!running_) return {Code::invalid_usage, "this master does not run"};
  }
  return std::move(*answer->status);
}

std::future<void> Server::departed(const PeerId& peer) {
  std::promise<void> done;
  std::future<void> departed = done.get_future();
  asio::post(context_, [this, peer, done = std::move(done)]() mutable {
    departures_.emplace_back(peer, std::move(done));
    act();
  });
  return departed;
}

void Server::tell_departures() {
  std::erase_if(departures_, [&](auto& item) {
    if (queued_ > 0 || !master_.departed(item.first)) return false;
    item.second.set_value();
    return true;
  });
}

// -- connections

io::Doorway::Owner Server::doorway_owner() {
  io::Doorway::Owner owner;
  owner.log_name = "master";
  if (secret_) {
    owner.tls = [this] { return tls_->server(io::TlsRole::control, secret_.control_key()); };
    owner.plain_reply = ask_for_secret();
    if (options_.relays) owner.plain_prefix = relay_prefix();
  }
  owner.accepted = [this](std::uint64_t id, std::unique_ptr<io::Socket> socket) {
    welcome(id, std::move(socket));
  };
  owner.drop = [this](std::uint64_t id, const std::string&) {
    drop(id);
    return true;
  };
  owner.free_descriptor = [this] { return free_descriptor(); };
  owner.act = [this] { act(); };
  return owner;
}

void Server::welcome(master::ConnectionId id, std::unique_ptr<io::Socket> socket) {
  const std::string from = io::plain(socket->remote().address()).to_string();
  Connection& connection = connections_[id];
  connection.socket = std::move(socket);
  connection.socket->try_again_evenly();
  master_.on_connect(id, from, clock_now());
  await_readable(id, connection);
}

bool Server::free_descriptor() {
  // Members stay, including those that have sent nothing since their admission.
  auto oldest = newcomers_.first_out();
  for (; oldest && master_.member(*oldest); oldest = newcomers_.first_out())
    promote(*oldest, connections_.at(*oldest));
  if (oldest) close_one(*oldest, "no descriptors are left");
  return oldest.has_value();
}

void Server::await_readable(master::ConnectionId id, Connection& connection) {
  connection.socket->wait_readable([this, id](const asio::error_code& error) {
    if (!error) read(id);
  });
}

void Server::read(master::ConnectionId id) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  const ssize_t result =
      io::read_available(*it->second.socket, scratch_, kReads,
                         [&](std::span<const std::uint8_t> bytes) { return take(id, bytes); });
  if (const auto open = connections_.find(id); open != connections_.end()) {
    if (result != -EAGAIN) {
      drop(id);
    } else if (!open->second.garbage) {
      await_readable(id, open->second);
    }
  }
  act();
}

bool Server::take(master::ConnectionId id, std::span<const std::uint8_t> bytes) {
  Connection& connection = connections_.at(id);
  if (connection.closing) return true;
  connection.reader.feed(bytes);
  for (;;) {
    promote(id, connection);
    wire::Frame frame;
    const Result<bool> next = connection.reader.next(frame);
    if (!next) {
      connection.garbage = true;
      master_.on_garbage(id, next.error(), clock_now());
      break;
    }
    if (!*next) break;
    if (const auto* open = std::get_if<wire::OpenRelay>(&frame.message);
        open != nullptr && !connection.known && options_.relays) {
      relay(id, open->token);
      return false;
    }
    // The connection began like one to relay, to avoid the TLS handshake.
    if (tls_ != nullptr && !connection.socket->secured()) {
      drop(id);
      return false;
    }
    master_.on_frame(id, frame, clock_now());
  }
  count_held(id, connection);
  make_room();
  const auto open = connections_.find(id);
  return open != connections_.end() && !open->second.garbage;
}

// Lifts limits when the peer identifies itself or becomes a member. A peer that has joined has no
// deadline for its messages. Members may send long messages, as may a returning member that was
// asked for its log.
void Server::promote(master::ConnectionId id, Connection& connection) {
  if (!connection.known && !master_.anonymous(id)) {
    connection.known = true;
    doorway_.pending().remove(id);
    newcomers_.add(id, connection.socket->remote().address());
  }
  if (connection.known && !connection.member && master_.member(id)) {
    connection.member = true;
    newcomers_.remove(id);
  }
  if (connection.known && master_.may_be_long(id)) connection.reader.limit(wire::kMaxPayload);
}

void Server::count_held(master::ConnectionId id, Connection& connection) {
  const std::size_t bytes = connection.reader.held_memory();
  doorway_.pending().set_bytes(id, bytes);
  newcomers_.set_bytes(id, bytes);
  if (!connection.member) return;
  held_ = held_ - connection.held + bytes;
  connection.held = bytes;
}

void Server::drop(master::ConnectionId id) {
  doorway_.forget(id);
  newcomers_.remove(id);
  if (const auto attempt = tries_.extract(id)) attempt.mapped()->cancel();
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  queued_ -= it->second.counted;
  held_ -= it->second.held;
  connections_.erase(it);
  master_.on_disconnect(id, clock_now());
}

// Gives the socket to the relay. The master reads nothing more from it.
void Server::relay(master::ConnectionId id, const RelayToken& token) {
  Connection& connection = connections_.at(id);
  const std::string from = io::plain(connection.socket->remote().address()).to_string();
  std::unique_ptr<io::Socket> socket = std::move(connection.socket);
  const bool proper = !socket->secured() && connection.reader.held() == 0;
  drop(id);
  if (proper) {
    auto again = io::Socket::make(context_, socket->give());  // see Connector::again
    if (!again) return doorway_.tell(LogLevel::warn, "cannot relay: " + again.error().reason);
    if (relays_.enter(token, std::move(*again), clock_now())) return;
  }
  doorway_.tell(LogLevel::info, "connection from " + from + ": its relay token is not expected");
}

void Server::make_room() {
  doorway_.make_room();
  while (const auto id = newcomers_.over_limit())
    close_one(*id, "newcomers have too many incomplete messages");
  while (held_ > kMaxHeldAll) {
    const auto most = std::max_element(
        connections_.begin(), connections_.end(),
        [](const auto& a, const auto& b) { return a.second.held < b.second.held; });
    close_one(most->first, "members have too many incomplete messages");
  }
}

// REQUIRES: the connection is open.
void Server::close_one(master::ConnectionId id, const std::string& why) {
  const auto from = connections_.at(id).socket->remote().address();
  doorway_.tell(LogLevel::warn, why + ": closed a connection from " + io::plain(from).to_string());
  drop(id);
}

// -- actions

// Carries out the master's actions. Each connection gets one write for all its messages.
void Server::act() {
  for (;;) {
    const std::vector<master::Action> actions = master_.take_actions();
    if (actions.empty()) break;
    std::set<master::ConnectionId> touched;
    for (const master::Action& action : actions) carry_out(action, touched);
    for (const master::ConnectionId id : touched) {
      const auto it = connections_.find(id);
      if (it != connections_.end() && !flush(id, it->second)) drop(id);
    }
    while (queued_ > kMaxQueuedAll) {
      const auto most = std::max_element(
          connections_.begin(), connections_.end(),
          [](const auto& a, const auto& b) { return a.second.counted < b.second.counted; });
      drop(most->first);
    }
  }
  tell_departures();
  arm_timer();
}

// Adds connections to flush to `touched`.
void Server::carry_out(const master::Action& action, std::set<master::ConnectionId>& touched) {
  if (const auto* send = std::get_if<master::Send>(&action)) {
    const auto it = connections_.find(send->to);
    if (it == connections_.end() || it->second.closing) return;
    // A connection that began as one to relay has not proved that it knows the secret.
    if (tls_ != nullptr && !it->second.socket->secured()) return;
    it->second.out.append(send->bytes);
    touched.insert(send->to);
  } else if (const auto* close = std::get_if<master::Close>(&action)) {
    const auto it = connections_.find(close->connection);
    if (it == connections_.end()) return;
    it->second.closing = clock_now() + kCloseGrace;
    touched.insert(close->connection);
  } else if (const auto* attempt = std::get_if<master::TryAddress>(&action)) {
    if (!connections_.contains(attempt->for_whom)) return;
    tries_[attempt->for_whom] = io::Connector::start(
        context_, attempt->address, {.connect = kTryTime},
        [this, whom = attempt->for_whom](const std::unique_ptr<io::Socket>& socket,
                                         const Error& failure) {
          tries_.erase(whom);
          master_.on_tried(whom, socket != nullptr, failure.reason, clock_now());
          act();
        });
  } else if (const auto* relay = std::get_if<master::ExpectRelay>(&action)) {
    relays_.expect(relay->one, relay->other, relay->token_of_one, relay->token_of_other,
                   clock_now(), relay->names);
  } else if (const auto* end = std::get_if<master::EndRelay>(&action)) {
    relays_.end(end->one, end->other);
  } else {
    const auto& line = std::get<master::LogLine>(action);
    log(LogLevel::info, "master",
        (line.group ? "group " + std::to_string(*line.group) + ": " : "") + line.text);
  }
}

bool Server::flush(master::ConnectionId id, Connection& connection) {
  const int result =
      connection.out.flush(*connection.socket, [this, id](const asio::error_code& error) {
        const auto it = connections_.find(id);
        if (error || it == connections_.end()) return;
        it->second.out.resume();
        if (!flush(id, it->second)) drop(id);
        act();
      });
  const std::size_t bytes = connection.out.size();
  queued_ = queued_ - connection.counted + bytes;
  connection.counted = bytes;
  // A broken connection stays until it is read: its last message, perhaps a Leave, may be unread.
  return result == -EAGAIN ? bytes <= kMaxQueued : !connection.closing;
}

void Server::arm_timer() {
  const Instant due = clock_now() + master_.tick();
  if (due >= armed_) return;
  armed_ = due;
  timer_.expires_at(due);
  timer_.async_wait([this](const asio::error_code& error) {
    if (error) return;  // armed again for an earlier time
    armed_ = Instant::max();
    const Instant now = clock_now();
    master_.on_time(now);
    std::vector<master::ConnectionId> late;
    for (const auto& [id, connection] : connections_) {
      if (connection.closing && now >= *connection.closing) late.push_back(id);
    }
    for (const master::ConnectionId id : late) drop(id);
    relays_.on_time(now);
    act();
  });
}

}  // namespace pccl::server
