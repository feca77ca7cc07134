#include "pccl/node/peer_connections.h"

#include <xxhash.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/log.h"
#include "pccl/io/address.h"
#include "pccl/os/tcp.h"
#include "pccl/wire/messages.h"

namespace pccl::node {
namespace {

constexpr std::size_t kTurnBytes = 4 << 20;   // moved on one stripe before others have their turn
constexpr std::size_t kShareBytes = 1 << 20;  // after which a thread writes no more in a turn
constexpr int kMaxPipes = 2;  // that one peer dials: a link, and the one that replaces it
constexpr Duration kPipeSpin = std::chrono::microseconds(50);  // for the other end of a pipe
constexpr std::uint64_t kInspectBytes = 32 << 20;  // sent between two looks at a socket's buffers

// The key that peers of this host prove to know. Without a secret the master knows it, too.
HostKey host_key(const io::Secret& secret, const MemoryKey& key) {
  return secret ? secret.host_key(key) : HostKey{key.bytes};
}

link::Path path_of(const io::Socket& socket) {
  link::Path path{.local = io::same_host(socket.local(), socket.remote())};
  if (const auto known = os::tcp_statistics(socket.raw())) path.round_trip = known->least_rtt;
  return path;
}

std::size_t total(std::span<const iovec> parts) {
  std::size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

}  // namespace

PeerConnections::PeerConnections(asio::io_context& context, peer::Engine& engine,
                                 const RuntimeOptions& options, std::shared_ptr<io::TlsContext> tls,
                                 io::Congestion congestion, io::Workers& workers,
                                 std::function<void()> act)
    : context_(context),
      engine_(engine),
      options_(options),
      tls_(std::move(tls)),
      congestion_(std::move(congestion)),
      workers_(workers),
      act_(std::move(act)),
      doorway_(context, doorway_owner()) {}

void PeerConnections::stop() {
  doorway_.stop();
  for (const auto& [token, attempt] : dials_) attempt->cancel();
  dials_.clear();
  connections_.clear();
  pipes_.clear();
  pipe_dials_.clear();
  neighbours_.reset();
}

// ---- sockets

io::Doorway::Owner PeerConnections::doorway_owner() {
  io::Doorway::Owner owner;
  owner.log_name = options_.join.name;
  if (tls_ != nullptr) {
    owner.tls = [this]() -> std::unique_ptr<io::Tls> {
      // The key depends on the run. Before this peer knows the run, no other peer can know this
      // one.
      return engine_.session().run() == 0 ? nullptr : make_tls(options_.join.id, true);
    };
  }
  owner.accepted = [this](std::uint64_t id, std::unique_ptr<io::Socket> socket) {
    const link::Path path = path_of(*socket);
    add_socket(id, std::move(socket), path.local);
    engine_.connections(clock_now()).on_accepted(id, path);
    resume(id);
  };
  owner.drop = [this](std::uint64_t id, const std::string& reason) {
    if (engine_.links().is_established(id))
      return false;  // it waited for its epoch, and is a link now
    engine_.connections(clock_now()).on_stripe_failed(id, {Code::unreachable, reason});
    close(id);
    return true;
  };
  owner.act = act_;
  return owner;
}

void PeerConnections::add_socket(std::uint64_t id, std::unique_ptr<io::Socket> socket, bool local) {
  if (!local) {
    socket->hold_little();
    congestion_.choose(socket->raw());
  }
  Connection& connection = connections_[id];
  connection.local = local;
  connection.socket = std::move(socket);
}

// This end of a link. `server`: the other end runs the client's part of the handshake.
std::unique_ptr<io::Tls> PeerConnections::make_tls(const PeerId& listener, bool server) const {
  if (tls_ == nullptr || listener.empty()) return nullptr;
  const io::Key key = options_.secret.link_key(engine_.session().run(), listener);
  return server ? tls_->server(io::TlsRole::link, key) : tls_->client(io::TlsRole::link, key);
}

// A relayed connection goes to the master. Its token is not encrypted: it is valid once, and the
// TLS handshake that follows is between the two peers.
void PeerConnections::dial(const link::DialRequest& request) {
  if (!request.neighbour.empty()) return dial_pipe(request);
  const bool relayed = !request.relay.empty();
  const PeerId& listener = request.accepts ? options_.join.id : request.peer;
  io::Connector::Relay relay;
  if (relayed)
    relay = {wire::encode({}, wire::OpenRelay{request.relay}), wire::encode({}, wire::Relayed{})};
  dials_[request.token] = io::Connector::start(
      context_, relayed ? options_.masters[engine_.control().at()] : request.address,
      {.connect = options_.settings.link_timeout},
      [this, relayed, token = request.token](std::unique_ptr<io::Socket> socket,
                                             const Error& failure) {
        dials_.erase(token);
        if (socket == nullptr) {
          engine_.connections(clock_now()).on_dial_failed(token, failure.reason);
        } else {
          const std::uint64_t id = doorway_.next_id();
          const link::Path path = relayed ? link::Path{} : path_of(*socket);
          add_socket(id, std::move(socket), path.local);
          engine_.connections(clock_now()).on_dialled(token, id, path);
          resume(id);
        }
        act_();
      },
      make_tls(listener, request.accepts), std::move(relay));
}

// Warns once if the kernel's limit on a socket's buffers slows transfers down.
void PeerConnections::inspect_buffers(const io::Socket& socket) {
  const auto info = os::tcp_statistics(socket.raw());
  if (!info || info->busy < std::chrono::seconds(1)) return;
  const bool sender = info->held_by_sender * 2 > info->busy;
  if (!sender && info->held_by_receiver * 2 <= info->busy) return;
  warned_of_buffers_ = true;
  log(LogLevel::warn, options_.join.name,
      std::string("connections to other hosts wait for ") +
          (sender ? "this host's send buffers more than half of the time: raise the last number of "
                    "net.ipv4.tcp_wmem here"
                  : "the other host's receive buffers more than half of the time: raise the last "
                    "number of net.ipv4.tcp_rmem there"));
}

void PeerConnections::resume(std::uint64_t id) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.reading || engine_.stripe(id) == nullptr) return;
  if (it->second.pipe != nullptr) return;  // step_pipes() looks at all of them
  it->second.reading = true;
  it->second.socket->wait_readable([this, id](const asio::error_code& error) {
    if (error) return;
    const auto found = connections_.find(id);
    if (found != connections_.end() && shares_work(found->second)) return queue(to_read_, id);
    read(id);
  });
}

void PeerConnections::read(std::uint64_t id) {
  if (!receive(id)) return;
  link::Stripe* stripe = engine_.stripe(id);
  if (stripe != nullptr && !stripe->held()) resume(id);
  act_();
}

// Gives the engine the bytes that have come. False: there is no such connection.
bool PeerConnections::receive(std::uint64_t id) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) return false;
  Connection& connection = it->second;
  connection.reading = false;
  engine_.at(clock_now());
  bool more = true;
  const std::size_t turn = connection.pipe != nullptr ? memory::kPipeBytes : kTurnBytes;
  for (std::size_t moved = 0; more && moved < turn;) {
    link::Stripe* stripe = engine_.stripe(id);
    if (stripe == nullptr) break;  // its owner closes it
    const std::span<const iovec> into = stripe->incoming();
    if (into.empty()) break;  // held: the engine asks to resume it
    const std::size_t room = total(into);
    const ssize_t got = connection.read(into);
    if (got == -EAGAIN) break;
    if (got <= 0) {
      failed(id, got);
      break;
    }
    const auto bytes = static_cast<std::size_t>(got);
    moved += bytes;
    more = bytes == room || connection.pipe != nullptr;
    if (const Status status = stripe->received(bytes); !status) {
      engine_.connections(clock_now()).on_stripe_failed(id, status.error());
      break;
    }
    engine_.combine();
  }
  heard(id);
  return true;
}

// `result`: of a read or write that ended the connection.
void PeerConnections::failed(std::uint64_t id, ssize_t result) {
  const std::string why =
      result == 0 ? "closed by the other end" : io::error_text(static_cast<int>(-result));
  engine_.connections(clock_now()).on_stripe_failed(id, {Code::unreachable, why});
}

// A connection that is established has passed the doorway.
void PeerConnections::heard(std::uint64_t id) {
  if (doorway_.pending().contains(id) && engine_.links().is_established(id))
    doorway_.pending().remove(id);
}

void PeerConnections::wait_writable(std::uint64_t id, Connection& connection) {
  connection.writing = true;
  if (connection.pipe != nullptr) return;  // step_pipes() writes again
  connection.socket->wait_writable([this, id](const asio::error_code& error) {
    const auto found = connections_.find(id);
    if (error || found == connections_.end()) return;
    found->second.writing = false;
    write(id);
    act_();
  });
}

void PeerConnections::write(std::uint64_t id) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.writing) return;
  Connection& connection = it->second;
  engine_.at(clock_now());
  const std::size_t turn = connection.pipe != nullptr ? memory::kPipeBytes : kTurnBytes;
  for (std::size_t put_in_all = 0;;) {
    link::Stripe* stripe = engine_.stripe(id);
    if (stripe == nullptr) return;
    stripe->gather();
    if (shares_work(connection) && stripe->gathered_bytes() >= kWorthSharing) {
      connection.writing = true;
      return queue(to_write_, id);
    }
    const std::span<const iovec> from = stripe->gathered();
    if (from.empty() && !connection.unsent()) return;
    if (put_in_all >= turn) {
      connection.writing = true;
      if (connection.pipe != nullptr) return;  // step_pipes() writes again
      return asio::post(context_, [this, id] {
        const auto found = connections_.find(id);
        if (found == connections_.end()) return;
        found->second.writing = false;
        write(id);
        act_();
      });
    }
    const ssize_t put = connection.write(from);
    if (put == -EAGAIN) return wait_writable(id, connection);
    if (put < 0 && connection.reading) return;  // read what came before the end first
    if (put < 0) return failed(id, put);
    stripe->sent(static_cast<std::size_t>(put));
    put_in_all += static_cast<std::size_t>(put);
    moved(connection, *stripe);
  }
}

void PeerConnections::moved(Connection& connection, const link::Stripe& stripe) {
  if (connection.socket == nullptr || connection.local || warned_of_buffers_ ||
      stripe.bytes_sent() - connection.inspected < kInspectBytes)
    return;
  connection.inspected = stripe.bytes_sent();
  inspect_buffers(*connection.socket);
}

// ---- several connections at a time

void PeerConnections::queue(std::vector<std::uint64_t>& list, std::uint64_t id) {
  list.push_back(id);
  if (std::exchange(turn_due_, true)) return;
  // After the events that the loop has seen already: they belong to the same turn.
  asio::post(context_, [this] { take_turn(); });
}

// Moves bytes of all connections that can, on several threads. The engine learns of it afterwards.
void PeerConnections::take_turn() {
  turn_due_ = false;
  engine_.at(clock_now());
  std::vector<Move> moves = next_moves();
  std::size_t bytes = 0;
  for (const Move& move : moves) {
    if (move.writes) bytes += move.stripe->gathered_bytes();
    if (move.reads) bytes += move.stripe->payload_left();
  }
  if (bytes >= kWorthSharing) {
    workers_.run(moves.size(), [&](std::size_t i) { carry_out(moves[i]); });
  } else {
    for (Move& move : moves) carry_out(move);
  }
  engine_.at(clock_now());
  for (const Move& move : moves)
    if (move.writes) wrote(move);
  for (const Move& move : moves)
    if (move.reads) has_read(move);
  engine_.combine();
  act_();
}

std::vector<PeerConnections::Move> PeerConnections::next_moves() {
  std::vector<Move> moves;
  const auto begin = [&](std::uint64_t id, bool Connection::*waits) -> Move* {
    const auto it = connections_.find(id);
    link::Stripe* const stripe = engine_.stripe(id);
    if (it == connections_.end()) return nullptr;
    it->second.*waits = false;
    if (stripe == nullptr) return nullptr;  // its owner closes it
    moves.push_back({id, &it->second, stripe});
    return &moves.back();
  };
  for (const std::uint64_t id : std::exchange(to_write_, {})) {
    Move* const move = begin(id, &Connection::writing);
    if (move == nullptr) continue;
    move->stripe->gather();
    move->writes = move->stripe->gathered_bytes() > 0 || move->connection->unsent();
    if (!move->writes) moves.pop_back();
  }
  const std::size_t writes = moves.size();
  for (const std::uint64_t id : std::exchange(to_read_, {})) {
    Move* move = begin(id, &Connection::reading);
    if (move == nullptr) continue;
    const std::size_t room = total(move->stripe->incoming());
    if (room == 0) {  // held: the engine asks to resume it
      moves.pop_back();
      continue;
    }
    const auto end = moves.begin() + static_cast<std::ptrdiff_t>(writes);
    const auto same =
        std::find_if(moves.begin(), end, [&](const Move& other) { return other.id == id; });
    if (same != end && move->connection->socket->secured()) {
      // OpenSSL cannot read and write one connection at the same time.
      moves.pop_back();
      move = &*same;
    } else if (same != end) {
      same->reads_beside = true;
    }
    move->reads = true;
    move->room = room;
  }
  return moves;
}

// On any thread.
void PeerConnections::carry_out(Move& move) {
  if (move.writes) {
    for (std::size_t put_in_all = 0; put_in_all < kShareBytes;) {
      const std::span<const iovec> from = move.stripe->gathered();
      if (from.empty() && !move.connection->unsent()) break;
      move.put = move.connection->write(from);
      if (move.put < 0) break;
      move.stripe->sent(static_cast<std::size_t>(move.put));
      put_in_all += static_cast<std::size_t>(move.put);
    }
  }
  if (move.reads) {
    move.got = move.connection->read(move.stripe->incoming());
    if (move.got > 0) move.stripe->check(static_cast<std::size_t>(move.got));
  }
}

void PeerConnections::wrote(const Move& move) {
  // The result of another move may have ended this stripe.
  if (engine_.stripe(move.id) == nullptr) return;
  if (move.put == -EAGAIN) return wait_writable(move.id, *move.connection);
  const bool reads = move.reads || move.reads_beside || move.connection->reading;
  if (move.put < 0 && reads) return;  // read what came before the end first
  if (move.put < 0) return failed(move.id, move.put);
  moved(*move.connection, *move.stripe);
  // There may be more to write.
  move.connection->writing = true;
  queue(to_write_, move.id);
}

void PeerConnections::has_read(const Move& move) {
  link::Stripe* stripe = engine_.stripe(move.id);
  // An event of another connection may have ended this one.
  if (stripe == nullptr || stripe->held()) return;
  bool more = false;
  if (move.got > 0) {
    const auto bytes = static_cast<std::size_t>(move.got);
    more = bytes == move.room;
    if (const Status status = stripe->received(bytes); !status)
      engine_.connections(clock_now()).on_stripe_failed(move.id, status.error());
  } else if (move.got != -EAGAIN) {
    failed(move.id, move.got);
  }
  heard(move.id);
  stripe = engine_.stripe(move.id);
  if (stripe == nullptr || stripe->held()) return;
  if (!more) return resume(move.id);
  move.connection->reading = true;
  queue(to_read_, move.id);
}

void PeerConnections::close(std::uint64_t id) {
  doorway_.pending().remove(id);
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  if (it->second.pipe != nullptr) {
    const PipeName name = it->second.name;
    pipes_.erase(name);
    if (neighbours_ != nullptr)
      neighbours_->offer(name.with, name.ours ? memory::Offer::pipe : memory::Offer::pipe_answer,
                         name.number, nullptr);
  }
  connections_.erase(it);
}

// ---- shared memory

void PeerConnections::listen_to_neighbours() {
  if (!options_.settings.shm) return;
  const std::string& name = options_.settings.host_id;
  auto made = std::make_unique<Neighbours>(
      context_, options_.join.id, host_key(options_.secret, options_.join.memory_key),
      name.empty() ? 0 : XXH3_64bits(name.data(), name.size()),
      NeighbourEvents{
          [this](const PeerId& peer) {
            // It may be back before its end was noticed.
            all_lost(peer, "replaced");
            engine_.connections(clock_now()).on_neighbour_up(peer);
          },
          [this](const PeerId& peer, const std::string& reason) {
            all_lost(peer, reason);
            engine_.connections(clock_now()).on_neighbour_down(peer, reason);
          },
          [this](const PeerId& peer, memory::Offer what, std::uint64_t number,
                 const memory::RegionPtr& region) {
            if (what == memory::Offer::pipe || what == memory::Offer::pipe_answer) {
              // Queued, since the engine may be in the middle of a call.
              pipe_events_.push_back(
                  {{peer, what == memory::Offer::pipe_answer, number}, region, {}, 0});
              return;
            }
            engine_.connections(clock_now()).on_neighbour_offer(peer, what, number, region);
          },
          [this](const PeerId& peer, memory::Offer what, std::uint64_t number,
                 const std::string& reason) {
            engine_.connections(clock_now()).on_neighbour_unmapped(peer, what, number, reason);
          },
          [this] { act_(); }});
  if (const Status status = made->listen(); !status) {
    log(LogLevel::warn, options_.join.name,
        "cannot find peers of this host (" + status.error().reason + "): reducing over TCP");
    return;
  }
  neighbours_ = std::move(made);
}

void PeerConnections::carry_out(const peer::LocalityActions& actions) {
  if (neighbours_ == nullptr) return;
  for (const PeerId& peer : actions.drops) {
    all_lost(peer, "not a neighbour any more");
    neighbours_->drop(peer);
  }
  for (const auto& [peer, key] : actions.dials)
    neighbours_->connect(peer, host_key(options_.secret, key));
  for (const auto& [to, what, number, region] : actions.offers)
    neighbours_->offer(to, what, number, region);
  for (const PeerId& peer : actions.rings) neighbours_->ring(peer);
}

void PeerConnections::ring_sleepers() {
  for (const auto& [name, id] : pipes_)
    if (connections_.at(id).pipe->must_ring()) neighbours_->ring(name.with);
}

// All pipes with that peer are lost.
void PeerConnections::all_lost(const PeerId& with, const std::string& reason) {
  pipe_events_.push_back({{with}, nullptr, reason, next_pipe_});
}

void PeerConnections::dial_pipe(const link::DialRequest& request) {
  auto own = memory::make_region(memory::kPipeEndBytes, memory::Access::read);
  if (!own || neighbours_ == nullptr) {
    return engine_.connections(clock_now())
        .on_dial_failed(request.token, own ? "no neighbours" : own.error().reason);
  }
  const PipeName name{request.neighbour, true, next_pipe_++};
  pipe_dials_[name] = {request.token, *own};
  neighbours_->offer(name.with, memory::Offer::pipe, name.number, *own);
}

void PeerConnections::take_pipe_events() {
  while (!pipe_events_.empty()) {
    const PipeEvent event = std::move(pipe_events_.front());
    pipe_events_.pop_front();
    if (!event.lost.empty()) {
      lose_pipes(event.name.with, event.lost, event.until);
    } else if (const auto open = pipes_.find(event.name); open != pipes_.end()) {
      lose_pipe(open->second, "closed by the other end");
    } else if (event.name.ours) {
      finish_pipe_dial(event.name, event.other);
    } else if (event.other != nullptr) {
      accept_pipe(event.name, event.other);
    }
  }
}

void PeerConnections::finish_pipe_dial(const PipeName& name, const memory::RegionPtr& other) {
  const auto it = pipe_dials_.find(name);
  if (it == pipe_dials_.end()) return;
  const PipeDial dial = std::move(it->second);
  pipe_dials_.erase(it);
  if (other == nullptr)
    return engine_.connections(clock_now()).on_dial_failed(dial.token, "refused");
  const std::uint64_t id = add_pipe(name, dial.own, other);
  engine_.connections(clock_now())
      .on_dialled(dial.token, id, {.local = true, .neighbour = name.with});
}

void PeerConnections::accept_pipe(const PipeName& name, const memory::RegionPtr& other) {
  const auto theirs = std::count_if(pipes_.begin(), pipes_.end(), [&](const auto& item) {
    return item.first.with == name.with && !item.first.ours;
  });
  auto own = memory::make_region(memory::kPipeEndBytes, memory::Access::read);
  if (theirs >= kMaxPipes || !own)
    return neighbours_->offer(name.with, memory::Offer::pipe_answer, name.number, nullptr);
  const std::uint64_t id = add_pipe(name, *own, other);
  neighbours_->offer(name.with, memory::Offer::pipe_answer, name.number, *own);
  engine_.connections(clock_now()).on_accepted(id, {.local = true, .neighbour = name.with});
}

std::uint64_t PeerConnections::add_pipe(const PipeName& name, memory::RegionPtr own,
                                        const memory::RegionPtr& other) {
  const std::uint64_t id = doorway_.next_id();
  Connection& connection = connections_[id];
  connection.pipe = std::make_unique<memory::Pipe>(std::move(own), other);
  connection.name = name;
  pipes_[name] = id;
  return id;
}

// Reads what was written before the end first.
void PeerConnections::lose_pipe(std::uint64_t id, const std::string& reason) {
  if (engine_.links().is_established(id)) (void)receive(id);
  engine_.connections(clock_now()).on_stripe_failed(id, {Code::unreachable, reason});
}

void PeerConnections::lose_pipes(const PeerId& with, const std::string& reason,
                                 std::uint64_t until) {
  const auto concerns = [&](const PipeName& name) {
    return name.with == with && (!name.ours || name.number < until);
  };
  std::vector<std::uint64_t> lost;
  for (const auto& [name, id] : pipes_) {
    if (concerns(name)) lost.push_back(id);
  }
  for (const std::uint64_t id : lost) lose_pipe(id, reason);
  std::vector<std::uint64_t> tokens;
  for (const auto& [name, dial] : pipe_dials_) {
    if (concerns(name)) tokens.push_back(dial.token);
  }
  std::erase_if(pipe_dials_, [&](const auto& item) { return concerns(item.first); });
  for (const std::uint64_t token : tokens)
    engine_.connections(clock_now()).on_dial_failed(token, reason);
}

Pace PeerConnections::step_pipes(bool may_sleep) {
  if (pipes_.empty()) return Pace::idle;
  std::vector<std::uint64_t> ids;
  for (const auto& [name, id] : pipes_) ids.push_back(id);
  const auto pipe = [&](std::uint64_t id) -> memory::Pipe* {
    const auto it = connections_.find(id);
    return it == connections_.end() ? nullptr : it->second.pipe.get();
  };
  const auto listens = [&](std::uint64_t id) {
    const link::Stripe* stripe = engine_.stripe(id);
    return stripe != nullptr && !stripe->held();
  };
  bool moved = false;
  for (const std::uint64_t id : ids) {
    if (pipe(id) == nullptr) continue;
    pipe(id)->wake_up();
    const std::uint64_t before = pipe(id)->moved();
    if (listens(id) && pipe(id)->readable()) (void)receive(id);
    if (pipe(id) != nullptr && pipe(id)->writable() &&
        std::exchange(connections_.at(id).writing, false))
      write(id);
    moved = moved || pipe(id) == nullptr || pipe(id)->moved() != before;
  }
  const Instant now = clock_now();
  if (moved) {
    act_();
    pipes_moved_ = now;
    return Pace::working;
  }
  if (now - pipes_moved_ < kPipeSpin) return Pace::yielding;
  if (!may_sleep) return Pace::idle;
  for (const std::uint64_t id : ids) {
    if (pipe(id) != nullptr && !pipe(id)->fall_asleep(listens(id), connections_.at(id).writing))
      return Pace::working;
  }
  return Pace::idle;
}

}  // namespace pccl::node
