#include "pccl/node/runtime.h"

#include <sched.h>
#include <sys/resource.h>
#include <xxhash.h>

#include <algorithm>
#include <asio/post.hpp>
#include <cerrno>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/fork.h"
#include "pccl/base/log.h"
#include "pccl/io/address.h"
#include "pccl/io/tcp_info.h"

namespace pccl::node {
namespace {

constexpr std::size_t kTurnBytes =
    4 << 20;                  // read or written on one stripe before others have their turn
constexpr int kMaxPipes = 2;  // that one peer dials: a link, and the one that replaces it
// For how long ahead timers are not set while something moves: small reductions come and go faster
// than that could be done for each. Callers that never wait add what the driver lets pass before
// it looks (kStarving and kDoze in loop.cpp): some 50 ms in all, and no deadline is so near that
// matters.
constexpr Duration kCoarse = std::chrono::milliseconds(20);
constexpr Duration kPipeSpin = std::chrono::microseconds(50);  // for the other end of a pipe
constexpr std::size_t kControlReadBytes = 64 << 10;
constexpr int kControlReads = 16;  // in one turn
constexpr int kAccepts = 64;       // in one turn
constexpr std::size_t kMaxAddresses = 32;
constexpr std::uint64_t kLookAfter = 32 << 20;  // bytes on one connection, each time
constexpr Duration kControlDialTimeout = std::chrono::seconds(5);
constexpr Duration kAcceptPause = std::chrono::milliseconds(100);  // when descriptors have run out

struct Listening {
  int descriptor = -1;
  asio::ip::tcp::endpoint at;
};

Result<Listening> listen(const std::string& bind_address, std::uint16_t port) {
  const auto descriptor = io::listen_at({bind_address, port});
  if (!descriptor) {
    Error error = descriptor.error();
    error.reason += " (PCCL_BIND, PCCL_PORT)";
    return error;
  }
  asio::io_context context;
  io::Socket listener(context, *descriptor);
  const auto at = listener.local();
  return Listening{listener.give(), at};
}

// Where others find what listens at `at`: in the order in which they try it. The first one has the
// listening port, and soon come those that somebody has named: a host may have a dozen that mean
// nothing elsewhere.
std::vector<wire::Address> own_addresses(const asio::ip::tcp::endpoint& at,
                                         const std::vector<wire::Address>& advertise) {
  std::vector<wire::Address> addresses;
  const auto add = [&](const wire::Address& address) {
    if (addresses.size() < kMaxAddresses &&
        std::find(addresses.begin(), addresses.end(), address) == addresses.end()) {
      addresses.push_back(address);
    }
  };
  const auto add_advertised = [&] {
    for (const wire::Address& address : advertise)
      add({address.host, address.port == 0 ? at.port() : address.port});
  };
  if (at.address().is_unspecified()) {
    for (const std::string& host : io::interface_addresses()) {
      if (at.address().is_v6() || host.find(':') == std::string::npos) add({host, at.port()});
      if (addresses.size() == 1) add_advertised();
    }
  } else {
    add({at.address().to_string(), at.port()});
    add_advertised();
  }
  return addresses;
}

// What neighbours have to know to be let in: words alone are no secrets where nothing is encrypted.
PeerId word_of(const io::Secret& secret, const PeerId& word) {
  return secret ? secret.host_word(word) : word;
}

std::size_t total(std::span<const iovec> parts) {
  std::size_t bytes = 0;
  for (const iovec& part : parts) bytes += part.iov_len;
  return bytes;
}

}  // namespace

Result<std::shared_ptr<Runtime>> Runtime::open(RuntimeOptions options) {
  if (!options.settings.tcp_congestion.empty()) {
    const Status works = io::check_congestion_control(options.settings.tcp_congestion);
    if (!works) return works.error();
  }
  std::shared_ptr<io::TlsContext> tls;
  if (options.secret) {
    auto made_tls = io::TlsContext::make(options.settings.key_update_records);
    if (!made_tls) return made_tls.error();
    tls = std::move(*made_tls);
  }
  const auto listening = listen(options.settings.bind_address, options.port);
  if (!listening) return listening.error();
  options.join.addresses = own_addresses(listening->at, options.advertise);
  if (options.settings.shm) options.join.memory_key = PeerId::random();
  options.join.ticket = PeerId::random();
  std::shared_ptr<Runtime> made(new Runtime(std::move(options), listening->descriptor));
  made->tls_ = std::move(tls);
  {
    const io::Turn turn(made->driver_);
    made->accept();
    made->listen_to_neighbours();
    made->engine_.start(clock_now());
    made->act();
  }
  made->driver_.on_failure([runtime = made.get()](const char* what) {
    runtime->engine_.fail(what);
    runtime->act();
  });
  if (made->neighbours_ != nullptr)
    made->driver_.on_idle([runtime = made.get()] { return runtime->step(); });
  made->driver_.start();
  return made;
}

peer::EngineOptions Runtime::engine_options() {
  peer::EngineOptions options;
  options.join = options_.join;
  options.settings = options_.settings;
  options.encrypted = static_cast<bool>(options_.secret);
  rlimit descriptors{};
  if (::getrlimit(RLIMIT_NOFILE, &descriptors) == 0 && descriptors.rlim_cur != RLIM_INFINITY)
    options.stripe_budget = static_cast<std::uint32_t>(
        std::clamp<rlim_t>(descriptors.rlim_cur / 4, 1, options.stripe_budget));
  if (!options_.settings.shm) return options;
  options.locality.make_region = memory::make_region;
  options.locality.find_array = memory::find_array;
  options.locality.poll = [this] {
    if (neighbours_ != nullptr) neighbours_->poll();
  };
  options.locality.patience = options_.settings.link_timeout;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0)
    options.locality.group.cores = static_cast<unsigned>(CPU_COUNT(&allowed));
  return options;
}

// Where peers of this host find us. Without it they do not, and all goes over TCP.
void Runtime::listen_to_neighbours() {
  if (!options_.settings.shm) return;
  const std::string& name = options_.settings.host_id;
  auto made = std::make_unique<node::Neighbours>(
      driver_.context(), options_.join.id, word_of(options_.secret, options_.join.memory_key),
      name.empty() ? 0 : XXH3_64bits(name.data(), name.size()),
      node::NeighbourEvents{
          [this](const PeerId& peer) {
            // It may have come again before we saw that it was gone.
            pipe_news_.push_back({{peer}, nullptr, "replaced", next_pipe_});
            engine_.on_neighbour_up(peer, clock_now());
          },
          [this](const PeerId& peer, const std::string& reason) {
            pipe_news_.push_back({{peer}, nullptr, reason, next_pipe_});
            engine_.on_neighbour_down(peer, reason, clock_now());
          },
          [this](const PeerId& peer, memory::Offer what, std::uint64_t number,
                 const memory::RegionPtr& region) {
            if (what == memory::Offer::pipe || what == memory::Offer::pipe_answer) {
              // The engine may be in the midst of something.
              pipe_news_.push_back(
                  {{peer, what == memory::Offer::pipe_answer, number}, region, {}, 0});
              return;
            }
            engine_.on_neighbour_offer(peer, what, number, region, clock_now());
          },
          [this] { act(); }});
  if (const Status status = made->listen(); !status) {
    log(LogLevel::warn, engine_.id(),
        "no neighbours can be found (" + status.error().reason + "): reducing over TCP");
    return;
  }
  neighbours_ = std::move(made);
}

// The collective in shared memory, and pipes; called by whoever drives the loop.
Pace Runtime::step() {
  if (shut_) return Pace::idle;
  // Pipes last: whoever comes before them may take in what would wake them.
  const Pace local = engine_.step(clock_now());
  if (engine_.has_actions() || !pipe_news_.empty()) act();
  const Pace pace = std::min(local, step_pipes(local == Pace::idle));  // the more urgent one
  if (engine_.has_actions()) {
    act();
    // What that did is looked at before anybody sleeps.
    if (!pipes_.empty()) return Pace::working;
  }
  if (pace == Pace::idle) arm_timer({});  // it may have begun to wait for something
  return pace;
}

Runtime::Runtime(RuntimeOptions options, int listener)
    : options_(std::move(options)),
      engine_(engine_options(), std::make_shared<BufferPool>(options_.settings.buffer_bytes)),
      listener_(std::make_unique<io::Socket>(driver_.context(), listener)),
      timer_(driver_.context()),
      accept_again_(driver_.context()),
      scratch_(kControlReadBytes) {}

Runtime::~Runtime() = default;

void Runtime::shut() {
  driver_.stop();
  const io::Turn turn(driver_);
  shut_ = true;
  listener_.reset();
  timer_.cancel();
  accept_again_.cancel();
  for (const auto& [token, connector] : dials_) connector->cancel();
  dials_.clear();
  for (const auto& [token, introduction] : introductions_) introduction->cancel();
  introductions_.clear();
  for (const auto& [number, handshake] : handshakes_) handshake->cancel();
  handshakes_.clear();
  if (control_dial_) control_dial_->cancel();
  control_dial_.reset();
  control_.socket.reset();
  wires_.clear();
  pipes_.clear();
  pipe_dials_.clear();
  neighbours_.reset();
}

void Runtime::thread_ended(const std::shared_ptr<Runtime>& runtime, std::uint64_t thread) {
  asio::post(runtime->driver_.context(), [at = runtime.get(), thread] {
    at->engine_.threads().ended(thread);
    at->act();
  });
}

// ---- carrying out
// -------------------------------------------------------------------------------------------------

void Runtime::act() {
  bool ended = false;
  for (bool more = true; more && !shut_;) {
    take_pipe_news();
    peer::EngineActions actions = engine_.take_actions();
    more = !actions.control.empty() || actions.dial_control || actions.close_control ||
           !actions.dials.empty() || !actions.flush.empty() || !actions.resume.empty() ||
           !actions.close.empty() || !actions.local.empty() || !pipe_news_.empty();
    ended = ended || actions.calls_ended;
    for (const auto& [level, text] : actions.log) log(level, engine_.id(), text);
    for (const wire::Bytes& bytes : actions.control) {
      control_.out.insert(control_.out.end(), bytes.begin(), bytes.end());
    }
    if (!actions.control.empty()) write_control();
    if (actions.close_control) finish_control();
    if (actions.dial_control) dial_control();
    for (const std::uint64_t id : actions.resume) {
      link::Stripe* stripe = engine_.stripe(id);
      if (stripe == nullptr) continue;
      if (const Status status = stripe->resume(); !status) {
        engine_.on_stripe_failed(id, status.error(), clock_now());
      } else {
        await_readable(id);
      }
    }
    for (const std::uint64_t id : actions.flush) write(id);
    for (const std::uint64_t id : actions.close) close(id);
    for (const link::DialRequest& request : actions.dials) dial(request);
    if (neighbours_ != nullptr) {
      for (const PeerId& peer : actions.local.drops) {
        pipe_news_.push_back({{peer}, nullptr, "not a neighbour any more", next_pipe_});
        neighbours_->drop(peer);
      }
      for (const auto& [peer, word] : actions.local.connects)
        neighbours_->connect(peer, word_of(options_.secret, word));
      for (const auto& [to, what, number, region] : actions.local.offers)
        neighbours_->offer(to, what, number, region);
      for (const PeerId& peer : actions.local.rings) neighbours_->ring(peer);
    }
  }
  for (const auto& [name, id] : pipes_)
    if (wires_.at(id).pipe->must_ring()) neighbours_->ring(name.with);
  // With neighbours, step() comes before every sleep.
  arm_timer(neighbours_ != nullptr ? kCoarse : Duration{});
  standing_.store(engine_.standing(), std::memory_order_release);
  unfinished_.store(engine_.calls().unfinished(), std::memory_order_release);
  join_failures_.store(engine_.master_link().failures(), std::memory_order_release);
  if (engine_.record() != newest_) {
    const std::lock_guard lock(newest_mutex_);
    newest_ = engine_.record();
  }
  control_flushed_.store(control_.socket == nullptr || control_.out.empty(),
                         std::memory_order_release);
  if (ended) driver_.notify();
}

// For the next deadline, but not in less than `least`.
void Runtime::arm_timer(Duration least) {
  if (shut_ || engine_.standing() == peer::Standing::out) return;
  Instant due = engine_.next_deadline();
  if (due >= armed_) return;
  due = std::max(due, clock_now() + least);
  if (due >= armed_) return;
  armed_ = due;
  timer_.expires_at(due);
  timer_.async_wait([this](const asio::error_code& error) {
    if (error) return;  // armed again for an earlier time
    armed_ = Instant::max();
    engine_.on_time(clock_now());
    act();
  });
}

// ---- the master
// ---------------------------------------------------------------------------------------------------

void Runtime::dial_control() {
  if (control_dial_) control_dial_->cancel();
  control_dial_ = io::Connector::start(
      driver_.context(), options_.master, kControlDialTimeout,
      [this](std::unique_ptr<io::Socket> socket, const Error& failure) {
        control_dial_.reset();
        if (socket == nullptr && failure.code == Code::authentication_failed) {
          engine_.on_stranger_at_master(
              "the master at " + wire::to_string(options_.master) + " " + failure.reason,
              clock_now());
        } else if (socket == nullptr) {
          dial_failure_ = failure.reason;
          engine_.on_control_lost(failure.reason, clock_now());
        } else {
          control_ = {};
          control_.socket = std::move(socket);
          control_.number = next_control_++;
          engine_.on_control_open(clock_now());
          await_control();
        }
        act();
      },
      tls_ == nullptr ? nullptr
                      : tls_->client(io::TlsRole::control, options_.secret.control_key()));
}

void Runtime::await_control() {
  control_.socket->wait_readable([this, number = control_.number](const asio::error_code& error) {
    if (!error) read_control(number);
  });
}

void Runtime::read_control(std::uint64_t number) {
  if (number != control_.number || control_.socket == nullptr || control_.closing) return;
  const iovec into{scratch_.data(), scratch_.size()};
  for (int i = 0; i < kControlReads; ++i) {
    const ssize_t got = control_.socket->read({&into, 1});
    if (got == -EAGAIN) break;
    if (got <= 0) {
      lose_control(got == 0 ? "the master closed the connection"
                            : io::error_text(static_cast<int>(-got)));
      return act();
    }
    engine_.on_control_bytes(std::span(scratch_).first(static_cast<std::size_t>(got)), clock_now());
    if (static_cast<std::size_t>(got) < scratch_.size()) break;
  }
  act();
  if (number == control_.number && control_.socket != nullptr && !control_.closing) await_control();
}

void Runtime::write_control() {
  if (control_.socket == nullptr) control_.out.clear();  // said again when the master is back
  if (control_.writing) return;
  while (control_.out_at < control_.out.size() ||
         (control_.socket != nullptr && control_.socket->unsent())) {
    const iovec from{control_.out.data() + control_.out_at, control_.out.size() - control_.out_at};
    const ssize_t put = control_.socket->write({&from, 1});
    if (put == -EAGAIN) {
      control_.writing = true;
      control_.socket->wait_writable(
          [this, number = control_.number](const asio::error_code& error) {
            if (error || number != control_.number) return;
            control_.writing = false;
            write_control();
            act();
          });
      return;
    }
    if (put < 0) break;  // what the master said last may still be unread: reading finds the end
    control_.out_at += static_cast<std::size_t>(put);
  }
  control_.out.clear();
  control_.out_at = 0;
  if (control_.closing) control_ = {};
}

void Runtime::lose_control(const std::string& reason) {
  const bool tell = !control_.closing;
  control_ = {};
  if (tell) engine_.on_control_lost(reason, clock_now());
}

// What is lined up goes out, as far as the other end takes it before the next connection is there.
void Runtime::finish_control() {
  if (control_.socket == nullptr) return;
  // Unread bytes would make closing a reset, which may overtake what was said last.
  const iovec into{scratch_.data(), scratch_.size()};
  for (int i = 0; i < kControlReads && control_.socket->read({&into, 1}) > 0; ++i) {
  }
  control_.closing = true;
  write_control();
}

// ---- other peers
// --------------------------------------------------------------------------------------------------

void Runtime::accept() {
  listener_->wait_readable([this](const asio::error_code& error) {
    if (error || shut_) return;
    int result = 0;
    for (int i = 0; i < kAccepts && result == 0; ++i) result = accept_one();
    if (result == 0 || result == -EAGAIN) {
      accept();
    } else {
      accept_again_.expires_after(kAcceptPause);
      accept_again_.async_wait([this](const asio::error_code& late) {
        if (!late) accept();
      });
      if (const auto line =
              rare_.line("cannot accept a connection: " + io::error_text(-result), clock_now()))
        log(LogLevel::warn, engine_.id(), *line);
    }
    act();
  });
}

// 0, or -errno when none is there or none can be taken. One that there is no memory for is closed,
// and nothing more.
int Runtime::accept_one() {
  const int descriptor = io::accept_on(*listener_);
  if (descriptor < 0) return descriptor;
  const std::uint64_t id = next_wire_++;
  try {
    auto socket = std::make_unique<io::Socket>(driver_.context(), descriptor);
    if (socket->remote().port() == 0) return 0;  // gone already; closes it
    // Its key is of this run and this peer: until we know the run nobody else can know us.
    if (tls_ != nullptr && engine_.session().run() == 0) return 0;  // closes it
    anteroom_.enter(id, socket->remote().address());
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

void Runtime::fail(std::uint64_t id, const std::exception& error) {
  if (const auto shaking = handshakes_.extract(id)) shaking.mapped()->cancel();
  engine_.on_stripe_failed(id, error.what(), clock_now());
  close(id);
  if (const auto line =
          rare_.line(std::string("a new connection was closed: ") + error.what(), clock_now()))
    log(LogLevel::warn, engine_.id(), *line);
}

// Too many connections have not said who they are: the oldest of them go.
void Runtime::make_room() {
  while (const auto goes = anteroom_.crowded()) {
    anteroom_.leave(*goes);
    if (engine_.established(*goes)) continue;  // it had waited for its epoch
    const auto shaking = handshakes_.find(*goes);
    const auto wire = wires_.find(*goes);
    const io::Socket* socket = shaking != handshakes_.end() ? &shaking->second->socket()
                               : wire != wires_.end()       ? wire->second.socket.get()
                                                            : nullptr;
    const std::string from =
        socket == nullptr ? "nobody" : io::plain(socket->remote().address()).to_string();
    if (const auto line = rare_.line(
            "too many connections do not say who they are: one of " + from + " was closed",
            clock_now()))
      log(LogLevel::warn, engine_.id(), *line);
    if (shaking == handshakes_.end()) {
      engine_.on_stripe_failed(*goes, "too many others wait", clock_now());
      continue;
    }
    shaking->second->cancel();
    handshakes_.erase(shaking);
  }
}

void Runtime::secure(std::uint64_t id, std::unique_ptr<io::Socket> socket) {
  handshakes_[id] = io::Handshake::start(
      driver_.context(), std::move(socket),
      tls_->server(io::TlsRole::link,
                   options_.secret.link_key(engine_.session().run(), options_.join.id)),
      {}, [this, id](std::unique_ptr<io::Socket> secured, const Error&) {
        handshakes_.erase(id);
        if (secured == nullptr) {
          anteroom_.leave(id);
          return act();
        }
        try {
          welcome(id, std::move(secured));
        } catch (const std::exception& error) {
          fail(id, error);
        }
        act();
      });
}

void Runtime::welcome(std::uint64_t id, std::unique_ptr<io::Socket> socket) {
  const bool local = io::same_host(socket->local(), socket->remote());
  if (!local) set_up(*socket);
  Wire& wire = wires_[id];
  wire.local = local;
  wire.socket = std::move(socket);
  engine_.on_accepted(id, local, clock_now());
  await_readable(id);
}

void Runtime::dial(const link::DialRequest& request) {
  if (!request.neighbour.empty()) return dial_pipe(request);
  if (!request.relay.empty()) return dial_relay(request);
  const std::uint64_t token = request.token;
  dials_[token] = io::Connector::start(
      driver_.context(), request.address, options_.settings.link_timeout,
      [this, token](std::unique_ptr<io::Socket> socket, const Error& failure) {
        dials_.erase(token);
        if (socket == nullptr) {
          engine_.on_dial_failed(token, failure.reason, clock_now());
        } else {
          const std::uint64_t id = next_wire_++;
          const bool local = io::same_host(socket->local(), socket->remote());
          if (!local) set_up(*socket);
          wires_[id].local = local;
          wires_[id].socket = std::move(socket);
          engine_.on_dialled(token, id, local, clock_now());
          await_readable(id);
        }
        act();
      },
      tls_ == nullptr || request.peer.empty()
          ? nullptr
          : tls_->client(io::TlsRole::link,
                         options_.secret.link_key(engine_.session().run(), request.peer)));
}

// Another connection to the master, who puts it through to the other peer.
void Runtime::dial_relay(const link::DialRequest& request) {
  dials_[request.token] = io::Connector::start(
      driver_.context(), options_.master, options_.settings.link_timeout,
      [this, request](std::unique_ptr<io::Socket> socket, const Error& failure) {
        dials_.erase(request.token);
        if (socket == nullptr) {
          engine_.on_dial_failed(request.token, failure.reason, clock_now());
        } else {
          introduce(request, std::move(socket));
        }
        act();
      });
}

// The token is said in the clear: it is good once, and what follows is between the two peers, whose
// TLS goes from end to end.
void Runtime::introduce(const link::DialRequest& request, std::unique_ptr<io::Socket> socket) {
  std::unique_ptr<io::Tls> tls;
  if (tls_ != nullptr) {
    const PeerId& listener = request.accepts ? options_.join.id : request.peer;
    const io::Key key = options_.secret.link_key(engine_.session().run(), listener);
    tls = request.accepts ? tls_->server(io::TlsRole::link, key)
                          : tls_->client(io::TlsRole::link, key);
  }
  introductions_[request.token] = io::Introduction::start(
      driver_.context(), std::move(socket), wire::encode({}, wire::OpenRelay{request.relay}),
      wire::encode({}, wire::Relayed{}), options_.settings.link_timeout,
      [this, token = request.token](std::unique_ptr<io::Socket> through, const Error& failure) {
        introductions_.erase(token);
        if (through == nullptr) {
          engine_.on_dial_failed(token, failure.reason, clock_now());
        } else {
          const std::uint64_t id = next_wire_++;
          set_up(*through);
          wires_[id].socket = std::move(through);
          engine_.on_dialled(token, id, false, clock_now());
          await_readable(id);
        }
        act();
      },
      std::move(tls));
}

// A connection to another host.
void Runtime::set_up(io::Socket& socket) const {
  socket.hold_little();
  if (!options_.settings.tcp_congestion.empty())
    io::set_congestion_control(socket.raw(), options_.settings.tcp_congestion);
}

// The kernel's buffers grow by themselves, up to a limit that somebody may have set too low.
void Runtime::look_at_buffers(const io::Socket& socket) {
  const auto info = io::tcp_info(socket.raw());
  if (!info || info->busy < std::chrono::seconds(1)) return;
  const bool sender = info->held_by_sender * 2 > info->busy;
  if (!sender && info->held_by_receiver * 2 <= info->busy) return;
  told_of_buffers_ = true;
  log(LogLevel::warn, engine_.id(),
      std::string("connections to other hosts wait for ") +
          (sender ? "this host's send buffers more than half of the time: raise the last number of "
                    "net.ipv4.tcp_wmem here"
                  : "the other host's receive buffers more than half of the time: raise the last "
                    "number of net.ipv4.tcp_rmem there"));
}

void Runtime::await_readable(std::uint64_t id) {
  const auto it = wires_.find(id);
  if (it == wires_.end() || it->second.reading || engine_.stripe(id) == nullptr) return;
  if (it->second.pipe != nullptr) return;  // step_pipes() looks at all of them
  it->second.reading = true;
  it->second.socket->wait_readable([this, id](const asio::error_code& error) {
    if (!error) read(id);
  });
}

void Runtime::read(std::uint64_t id) {
  if (!receive(id)) return;
  link::Stripe* stripe = engine_.stripe(id);
  if (stripe != nullptr && !stripe->held()) await_readable(id);
  act();
}

// Brings the engine what has come. False: there is no such wire.
bool Runtime::receive(std::uint64_t id) {
  const auto it = wires_.find(id);
  if (it == wires_.end()) return false;
  Wire& wire = it->second;
  wire.reading = false;
  engine_.at(clock_now());
  bool more = true;
  const std::size_t turn = wire.pipe != nullptr ? memory::kPipeBytes : kTurnBytes;
  for (std::size_t moved = 0; more && moved < turn;) {
    link::Stripe* stripe = engine_.stripe(id);
    if (stripe == nullptr) break;  // act() closes it
    const std::span<const iovec> into = stripe->incoming();
    if (into.empty()) break;  // held: resume comes back
    const std::size_t room = total(into);
    const ssize_t got = wire.read(into);
    if (got == -EAGAIN) break;
    if (got <= 0) {
      engine_.on_stripe_failed(
          id, got == 0 ? "closed by the other end" : io::error_text(static_cast<int>(-got)),
          clock_now());
      break;
    }
    const auto bytes = static_cast<std::size_t>(got);
    moved += bytes;
    more = bytes == room || wire.pipe != nullptr;
    if (const Status status = stripe->received(bytes); !status) {
      engine_.on_stripe_failed(id, status.error(), clock_now());
      break;
    }
  }
  if (anteroom_.contains(id) && engine_.established(id)) anteroom_.leave(id);
  return true;
}

void Runtime::write(std::uint64_t id) {
  const auto it = wires_.find(id);
  if (it == wires_.end() || it->second.writing) return;
  Wire& wire = it->second;
  const auto go_on = [this, id](const asio::error_code& error) {
    const auto found = wires_.find(id);
    if (error || found == wires_.end()) return;
    found->second.writing = false;
    write(id);
    act();
  };
  engine_.at(clock_now());
  const std::size_t turn = wire.pipe != nullptr ? memory::kPipeBytes : kTurnBytes;
  for (std::size_t moved = 0;;) {
    link::Stripe* stripe = engine_.stripe(id);
    if (stripe == nullptr) return;
    const std::span<const iovec> from = stripe->outgoing();
    if (from.empty() && !wire.unsent()) return;
    if (moved >= turn) {
      wire.writing = true;
      if (wire.pipe == nullptr) asio::post(driver_.context(), [go_on] { go_on({}); });
      return;
    }
    const ssize_t put = wire.write(from);
    if (put == -EAGAIN) {
      wire.writing = true;
      // Of a pipe: step_pipes() comes back to it.
      if (wire.pipe == nullptr) wire.socket->wait_writable(go_on);
      return;
    }
    if (put < 0 && wire.reading) return;  // what came before the end is read first
    if (put < 0) {
      engine_.on_stripe_failed(id, io::error_text(static_cast<int>(-put)), clock_now());
      return;
    }
    stripe->sent(static_cast<std::size_t>(put));
    moved += static_cast<std::size_t>(put);
    if (wire.socket != nullptr && !wire.local && !told_of_buffers_ &&
        stripe->bytes_sent() - wire.looked_after >= kLookAfter) {
      wire.looked_after = stripe->bytes_sent();
      look_at_buffers(*wire.socket);
    }
  }
}

void Runtime::close(std::uint64_t id) {
  anteroom_.leave(id);
  const auto it = wires_.find(id);
  if (it == wires_.end()) return;
  if (it->second.pipe != nullptr) {
    const PipeName name = it->second.name;
    pipes_.erase(name);
    if (neighbours_ != nullptr)
      neighbours_->offer(name.with, name.ours ? memory::Offer::pipe : memory::Offer::pipe_answer,
                         name.number, nullptr);
  }
  wires_.erase(it);
}

// ---- pipes
// -------------------------------------------------------------------------------------------------------

void Runtime::dial_pipe(const link::DialRequest& request) {
  auto own = memory::make_region(memory::kPipeEndBytes, memory::Access::read);
  if (!own || neighbours_ == nullptr) {
    return engine_.on_dial_failed(request.token, own ? "no neighbours" : own.error().reason,
                                  clock_now());
  }
  const PipeName name{request.neighbour, true, next_pipe_++};
  pipe_dials_[name] = {request.token, *own};
  neighbours_->offer(name.with, memory::Offer::pipe, name.number, *own);
}

// Ends of pipes that came, pipes that were closed, and neighbours that are gone with all of theirs.
void Runtime::take_pipe_news() {
  while (!pipe_news_.empty()) {
    const PipeNews news = std::move(pipe_news_.front());
    pipe_news_.pop_front();
    if (!news.lost.empty()) {
      lose_pipes(news.name.with, news.lost, news.until);
    } else if (const auto open = pipes_.find(news.name); open != pipes_.end()) {
      lose_pipe(open->second, "closed by the other end");
    } else if (news.name.ours) {
      finish_pipe_dial(news.name, news.other);
    } else if (news.other != nullptr) {
      accept_pipe(news.name, news.other);
    }
  }
}

void Runtime::finish_pipe_dial(const PipeName& name, const memory::RegionPtr& other) {
  const auto it = pipe_dials_.find(name);
  if (it == pipe_dials_.end()) return;
  const PipeDial dial = std::move(it->second);
  pipe_dials_.erase(it);
  if (other == nullptr) return engine_.on_dial_failed(dial.token, "refused", clock_now());
  const std::uint64_t id = next_wire_++;
  add_pipe(name, dial.own, other, id);
  engine_.on_dialled(dial.token, id, true, clock_now(), true);
}

void Runtime::accept_pipe(const PipeName& name, const memory::RegionPtr& other) {
  const auto theirs = std::count_if(pipes_.begin(), pipes_.end(), [&](const auto& item) {
    return item.first.with == name.with && !item.first.ours;
  });
  if (theirs >= kMaxPipes)
    return neighbours_->offer(name.with, memory::Offer::pipe_answer, name.number, nullptr);
  auto own = memory::make_region(memory::kPipeEndBytes, memory::Access::read);
  if (!own) return neighbours_->offer(name.with, memory::Offer::pipe_answer, name.number, nullptr);
  const std::uint64_t id = next_wire_++;
  add_pipe(name, *own, other, id);
  neighbours_->offer(name.with, memory::Offer::pipe_answer, name.number, *own);
  engine_.on_accepted(id, true, clock_now(), name.with);
}

void Runtime::add_pipe(const PipeName& name, memory::RegionPtr own, const memory::RegionPtr& other,
                       std::uint64_t id) {
  Wire& wire = wires_[id];
  wire.pipe = std::make_unique<memory::Pipe>(std::move(own), other);
  wire.name = name;
  pipes_[name] = id;
}

// What was written before the end is read first.
void Runtime::lose_pipe(std::uint64_t id, const std::string& reason) {
  if (engine_.established(id)) (void)receive(id);
  engine_.on_stripe_failed(id, reason, clock_now());
}

void Runtime::lose_pipes(const PeerId& with, const std::string& reason, std::uint64_t until) {
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
  for (const std::uint64_t token : tokens) engine_.on_dial_failed(token, reason, clock_now());
}

// Reads and writes what can be. When nothing moves, and nothing else does, it falls asleep.
Pace Runtime::step_pipes(bool may_sleep) {
  if (pipes_.empty()) return Pace::idle;
  std::vector<std::uint64_t> ids;
  for (const auto& [name, id] : pipes_) ids.push_back(id);
  const auto pipe = [&](std::uint64_t id) -> memory::Pipe* {
    const auto it = wires_.find(id);
    return it == wires_.end() ? nullptr : it->second.pipe.get();
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
    if (pipe(id) != nullptr && pipe(id)->writable() && std::exchange(wires_.at(id).writing, false))
      write(id);
    moved = moved || pipe(id) == nullptr || pipe(id)->moved() != before;
  }
  const Instant now = clock_now();
  if (moved) {
    act();
    pipes_moved_ = now;
    return Pace::working;
  }
  if (now - pipes_moved_ < kPipeSpin) return Pace::yielding;
  if (!may_sleep) return Pace::idle;
  for (const std::uint64_t id : ids) {
    if (pipe(id) != nullptr && !pipe(id)->fall_asleep(listens(id), wires_.at(id).writing))
      return Pace::working;
  }
  return Pace::idle;
}

}  // namespace pccl::node
