#include "pccl/server/server.h"

#include <pthread.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <limits>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/log.h"
#include "pccl/io/address.h"

namespace pccl::server {
namespace {

constexpr std::size_t kMaxQueued = 64 << 20;      // bytes that a peer does not fetch
constexpr std::size_t kMaxQueuedAll = 512 << 20;  // that all of them together do not
constexpr std::size_t kMaxHeldAll = 512 << 20;    // that messages of members take until they end
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kReadBytes = 64 << 10;
constexpr int kReads = 16;    // of one connection in one turn
constexpr int kAccepts = 64;  // in one turn
constexpr Duration kTryTime = std::chrono::seconds(2);
constexpr Duration kCloseGrace = std::chrono::seconds(1);
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);  // when descriptors have run out

master::Options options_from(const Settings& settings, std::uint32_t min_peers) {
  master::Options options;
  options.min_peers = min_peers;
  options.heartbeat_interval = settings.heartbeat_interval;
  options.heartbeat_timeout = settings.heartbeat_timeout;
  options.reconnect_timeout = settings.reconnect_timeout;
  options.straggler_timeout = settings.straggler_timeout;
  options.replan_interval = settings.replan_interval;
  options.measure_after = settings.measure_after;
  options.segment_bytes = static_cast<std::uint32_t>(settings.segment_bytes);
  options.relays = settings.relay;
  return options;
}

// What a connection that is to be relayed begins with, in the clear also where there is a secret:
// a header's magic number, version and type.
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

// For who speaks in the clear with a master that has a secret. It says nothing of the run.
wire::Bytes ask_for_secret() {
  return wire::encode(
      wire::Envelope{},
      wire::Refused{Code::authentication_failed,
                    "this run needs its secret: set PCCL_SECRET or PCCL_SECRET_FILE"});
}

}  // namespace

Server::Server(wire::Address listen, const Settings& settings, io::Secret secret,
               std::uint32_t min_peers)
    : listen_(std::move(listen)),
      options_(options_from(settings, min_peers)),
      secret_(std::move(secret)),
      key_update_records_(settings.key_update_records),
      master_(options_, random_run(), 1),
      relays_(context_, settings.relay_rate, io::waiting_limit() / 2),
      timer_(context_),
      accept_again_(context_),
      newcomers_(kNoLimit, kNoLimit, io::kMaxWaitingBytes),
      scratch_(kReadBytes) {}

Server::~Server() { interrupt(); }

Status Server::run() {
  if (secret_) {
    auto tls = io::TlsContext::make(key_update_records_);
    if (!tls) return tls.error();
    tls_ = std::move(*tls);
  }
  const auto listener = io::listen_at(listen_);
  if (!listener) return listener.error();
  listener_ = std::make_unique<io::Socket>(context_, *listener);
  address_ = io::to_string(listener_->local());
  if (!secret_ && !listener_->local().address().is_loopback()) {
    log(LogLevel::warn, "master",
        "anybody who reaches " + address_ +
            " can join, and nothing is encrypted: this master has no secret (PCCL_SECRET)");
  }
  accept();
  arm_timer();
  const std::lock_guard lock(mutex_);
  // Signals are for the program's own threads.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { serve(); });
    running_ = true;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return {};
}

void Server::serve() {
  for (;;) {
    try {
      // Whatever a handler has left undone when it failed:
      if (!accepting_) accept();
      act();
      context_.run();
      break;
    } catch (const std::exception& error) {
      // No memory or no descriptor for one connection: the others go on.
      log(LogLevel::err, "master", std::string("the master met: ") + error.what());
    }
  }
  for (const auto& [id, handshake] : handshakes_) handshake->cancel();
  handshakes_.clear();
  for (const auto& [id, attempt] : tries_) attempt->cancel();
  tries_.clear();
  relays_.stop();
  connections_.clear();
  listener_.reset();
  const std::lock_guard lock(mutex_);
  running_ = false;
  ended_.notify_all();
}

void Server::interrupt() {
  context_.stop();
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return !running_; });
  if (thread_.joinable()) thread_.join();  // it has nothing left to do but to end
}

bool Server::wait(Instant until) {
  std::unique_lock lock(mutex_);
  return ended_.wait_until(lock, until, [&] { return !running_; });
}

void Server::accept() {
  listener_->wait_readable([this](const asio::error_code& error) {
    if (error) return;
    accepting_ = false;
    int result = 0;
    for (int i = 0; i < kAccepts && result == 0; ++i) {
      result = accept_one();
      if (result != -EMFILE && result != -ENFILE) continue;
      // Members are not put out for it, also those that have said nothing since they came in.
      auto goes = newcomers_.first_out();
      for (; goes && master_.member(*goes); goes = newcomers_.first_out())
        promote(*goes, connections_.at(*goes));
      if (!goes) break;
      close_one(*goes, "no descriptors are left, and newcomers wait");
      result = 0;
    }
    if (result == 0 || result == -EAGAIN) {
      accept();
    } else {
      accept_again_.expires_after(kAcceptPause);
      accept_again_.async_wait([this](const asio::error_code& late) {
        if (!late) accept();
      });
      accepting_ = true;
      if (const auto line =
              rare_.line("cannot accept a connection: " + io::error_text(-result), clock_now()))
        log(LogLevel::warn, "master", *line);
    }
    act();
  });
  accepting_ = true;
}

// 0, or -errno when none is there or none can be taken. One that there is no memory for is closed,
// and nothing more.
int Server::accept_one() {
  const int descriptor = io::accept_on(*listener_);
  if (descriptor < 0) return descriptor;
  const master::ConnectionId id = next_++;
  try {
    auto socket = std::make_unique<io::Socket>(context_, descriptor);
    if (socket->remote().port() == 0) return 0;  // gone already; closes it
    anteroom_.enter(id, io::plain(socket->remote().address()));
    if (tls_ != nullptr) {
      secure(id, std::move(socket));
    } else {
      welcome(id, std::move(socket));
    }
    make_room();
  } catch (const std::exception& error) {
    fail(id, error);
  }
  return 0;
}

void Server::fail(master::ConnectionId id, const std::exception& error) {
  drop(id);
  if (const auto line =
          rare_.line(std::string("a new connection was closed: ") + error.what(), clock_now()))
    log(LogLevel::warn, "master", *line);
}

// Who does not know the secret comes no further, and is told nothing of the run.
void Server::secure(master::ConnectionId id, std::unique_ptr<io::Socket> socket) {
  const std::string from = io::plain(socket->remote().address()).to_string();
  handshakes_[id] = io::Handshake::start(
      context_, std::move(socket), tls_->server(io::TlsRole::control, secret_.control_key()),
      ask_for_secret(),
      [this, id, from](std::unique_ptr<io::Socket> secured, const Error& failure) {
        handshakes_.erase(id);
        if (secured == nullptr) {
          anteroom_.leave(id);
          if (const auto line =
                  rare_.line("connection from " + from + ": it " + failure.reason, clock_now()))
            log(LogLevel::info, "master", *line);
          return act();
        }
        try {
          welcome(id, std::move(secured));
        } catch (const std::exception& error) {
          fail(id, error);
        }
        act();
      },
      options_.relays ? relay_prefix() : wire::Bytes{});
}

void Server::welcome(master::ConnectionId id, std::unique_ptr<io::Socket> socket) {
  const std::string from = io::plain(socket->remote().address()).to_string();
  Connection& connection = connections_[id];
  connection.socket = std::move(socket);
  master_.on_connect(id, from, clock_now());
  await_readable(id, connection);
}

void Server::await_readable(master::ConnectionId id, Connection& connection) {
  connection.socket->wait_readable([this, id](const asio::error_code& error) {
    if (!error) read(id);
  });
}

void Server::read(master::ConnectionId id) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  Connection& connection = it->second;
  const iovec into{scratch_.data(), scratch_.size()};
  bool lost = false;
  bool garbage = false;
  for (int i = 0; i < kReads && !garbage; ++i) {
    const ssize_t got = connection.socket->read({&into, 1});
    if (got == -EAGAIN) break;
    if (got <= 0) {
      lost = true;
      break;
    }
    const auto bytes = static_cast<std::size_t>(got);
    if (!connection.closing) {
      connection.reader.feed(std::span(scratch_).first(bytes));
      for (;;) {
        promote(id, connection);
        wire::Frame frame;
        const Result<bool> next = connection.reader.next(frame);
        if (!next) {
          master_.on_garbage(id, next.error(), clock_now());
          garbage = true;
          break;
        }
        if (!*next) break;
        if (const auto* open = std::get_if<wire::OpenRelay>(&frame.message);
            open != nullptr && !connection.known && options_.relays) {
          return relay(id, open->token);
        }
        if (tls_ != nullptr && !connection.socket->secured()) return drop(id);  // or it lied
        master_.on_frame(id, frame, clock_now());
      }
      count_held(id, connection);
      make_room();
      if (!connections_.contains(id)) return act();
    }
    if (bytes < scratch_.size()) break;
  }
  if (lost) {
    drop(id);
  } else if (!garbage) {
    await_readable(id, connection);
  }
  act();
}

// A peer that has joined may take its time. A member may send long messages, and so may one that
// came back and was asked for its log.
void Server::promote(master::ConnectionId id, Connection& connection) {
  if (!connection.known && !master_.anonymous(id)) {
    connection.known = true;
    anteroom_.leave(id);
    newcomers_.enter(id, io::plain(connection.socket->remote().address()));
  }
  if (connection.known && !connection.member && master_.member(id)) {
    connection.member = true;
    newcomers_.leave(id);
  }
  if (connection.known && master_.may_be_long(id)) connection.reader.limit(wire::kMaxPayload);
}

void Server::count_held(master::ConnectionId id, Connection& connection) {
  const std::size_t bytes = connection.reader.held_memory();
  anteroom_.holds(id, bytes);
  newcomers_.holds(id, bytes);
  if (!connection.member) return;
  held_ = held_ - connection.held + bytes;
  connection.held = bytes;
}

void Server::drop(master::ConnectionId id) {
  anteroom_.leave(id);
  newcomers_.leave(id);
  if (const auto shaking = handshakes_.extract(id)) shaking.mapped()->cancel();
  if (const auto attempt = tries_.extract(id)) attempt.mapped()->cancel();
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  queued_ -= it->second.counted;
  held_ -= it->second.held;
  connections_.erase(it);
  master_.on_disconnect(id, clock_now());
}

// What is said on it from now on is not for us.
void Server::relay(master::ConnectionId id, const PeerId& token) {
  Connection& connection = connections_.at(id);
  const std::string from = io::plain(connection.socket->remote().address()).to_string();
  std::unique_ptr<io::Socket> socket = std::move(connection.socket);
  const bool proper = !socket->secured() && connection.reader.held() == 0;
  drop(id);
  // Registered anew: see Connector::writable.
  if (proper &&
      relays_.enter(token, std::make_unique<io::Socket>(context_, socket->give()), clock_now()))
    return act();
  const std::string text = "connection from " + from + ": nobody is expected with its token";
  if (const auto line = rare_.line(text, clock_now())) log(LogLevel::info, "master", *line);
  act();
}

// Too many connections say nothing, or too little: some of them go.
void Server::make_room() {
  while (const auto goes = anteroom_.crowded())
    close_one(*goes, "too many connections do not say who they are");
  while (const auto goes = newcomers_.crowded())
    close_one(*goes, "newcomers begin too much that they do not end");
  while (held_ > kMaxHeldAll) {
    const auto most = std::max_element(
        connections_.begin(), connections_.end(),
        [](const auto& a, const auto& b) { return a.second.held < b.second.held; });
    close_one(most->first, "members begin too much that they do not end");
  }
}

void Server::close_one(master::ConnectionId id, const std::string& why) {
  const auto shaking = handshakes_.find(id);
  const auto known = connections_.find(id);
  const io::Socket* socket = shaking != handshakes_.end()  ? &shaking->second->socket()
                             : known != connections_.end() ? known->second.socket.get()
                                                           : nullptr;
  const std::string from =
      socket == nullptr ? "nobody" : io::plain(socket->remote().address()).to_string();
  if (const auto line = rare_.line(why + ": one of " + from + " was closed", clock_now()))
    log(LogLevel::warn, "master", *line);
  drop(id);
}

void Server::count(Connection& connection) {
  const std::size_t bytes = connection.out.size() - connection.out_at;
  queued_ = queued_ - connection.counted + bytes;
  connection.counted = bytes;
}

// Carries out what the master decided; each connection gets one write for all that it is told.
void Server::act() {
  for (;;) {
    const std::vector<master::Action> actions = master_.take_actions();
    if (actions.empty()) break;
    std::set<master::ConnectionId> touched;
    for (const master::Action& action : actions) {
      if (const auto* send = std::get_if<master::Send>(&action)) {
        const auto it = connections_.find(send->to);
        if (it == connections_.end() || it->second.closing) continue;
        // Who has come for a relay has not shown that it knows the secret.
        if (tls_ != nullptr && !it->second.socket->secured()) continue;
        it->second.out.insert(it->second.out.end(), send->bytes.begin(), send->bytes.end());
        touched.insert(send->to);
      } else if (const auto* close = std::get_if<master::Close>(&action)) {
        const auto it = connections_.find(close->connection);
        if (it == connections_.end()) continue;
        it->second.closing = clock_now() + kCloseGrace;
        touched.insert(close->connection);
      } else if (const auto* attempt = std::get_if<master::TryAddress>(&action)) {
        if (!connections_.contains(attempt->for_whom)) continue;
        tries_[attempt->for_whom] = io::Connector::start(
            context_, attempt->address, kTryTime,
            [this, whom = attempt->for_whom](const std::unique_ptr<io::Socket>& socket,
                                             const Error& failure) {
              tries_.erase(whom);
              master_.on_tried(whom, socket != nullptr, failure.reason, clock_now());
              act();
            });
      } else if (const auto* relay = std::get_if<master::ExpectRelay>(&action)) {
        relays_.expect(relay->one, relay->other, relay->token_of_one, relay->token_of_other,
                       clock_now());
      } else if (const auto* end = std::get_if<master::EndRelay>(&action)) {
        relays_.end(end->one, end->other, clock_now());
      } else {
        log(LogLevel::info, "master", std::get<master::LogLine>(action).text);
      }
    }
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
  arm_timer();
}

bool Server::flush(master::ConnectionId id, Connection& connection) {
  const bool stays = write(id, connection);
  count(connection);
  return stays;
}

bool Server::write(master::ConnectionId id, Connection& connection) {
  const auto empty = [&] {
    connection.out.clear();
    if (connection.out.capacity() > wire::kKeptBuffer) wire::Bytes().swap(connection.out);
    connection.out_at = 0;
  };
  const auto left = [&] {
    return connection.out_at < connection.out.size() || connection.socket->unsent();
  };
  while (!connection.writing && left()) {
    const iovec from{connection.out.data() + connection.out_at,
                     connection.out.size() - connection.out_at};
    const ssize_t put = connection.socket->write({&from, 1});
    if (put == -EAGAIN) {
      connection.writing = true;
      connection.socket->wait_writable([this, id](const asio::error_code& error) {
        const auto it = connections_.find(id);
        if (error || it == connections_.end()) return;
        it->second.writing = false;
        if (!flush(id, it->second)) drop(id);
        act();
      });
      break;
    }
    if (put < 0) {
      // What the peer said last may still be unread, a Leave perhaps: reading finds the end.
      empty();
      return !connection.closing;
    }
    connection.out_at += static_cast<std::size_t>(put);
  }
  if (!left()) {
    empty();
    return !connection.closing;
  }
  if (connection.out_at > connection.out.size() / 2) {
    connection.out.erase(connection.out.begin(),
                         connection.out.begin() + static_cast<std::ptrdiff_t>(connection.out_at));
    connection.out_at = 0;
  }
  return connection.out.size() - connection.out_at <= kMaxQueued;
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
