#include "pccl/node/runtime.h"

#include <algorithm>
#include <asio/post.hpp>
#include <utility>

#include "pccl/base/clock.h"
#include "pccl/base/log.h"
#include "pccl/io/address.h"
#include "pccl/os/pages.h"
#include "pccl/os/process.h"
#include "pccl/os/shared_memory.h"

namespace pccl::node {
namespace {

// While something moves, timers are not set for less than this: small reductions come and go faster
// than timers can be set. With callers that never wait, the loop adds its own delay (kStarving and
// kDoze in loop.cpp): some 50 ms in all. No deadline is so near that this matters.
constexpr Duration kCoarse = std::chrono::milliseconds(20);
constexpr std::size_t kMaxAddresses = 32;
// Stripes of a link where this peer may use BBR. A loss does not slow it down, so a link needs
// fewer, and more of them made it slower (docs/guide/performance.md).
constexpr link::StripeTuner::Options kPacedStripes{6, 2, 16};

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

// The addresses at which others try to reach a listener at `at`, in that order. The first one has
// the listening port. Advertised addresses come next: a host may have a dozen others that mean
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

// PCCL_THREADS, or this peer's share of half the cores: the program needs some, too.
unsigned threads_of(const Settings& settings, unsigned cores, std::size_t local_peers) {
  constexpr unsigned kMost = 8;
  if (settings.threads > 0) return settings.threads;
  const auto sharing = static_cast<unsigned>(local_peers + 1);
  return std::clamp(cores / 2 / sharing, 1U, kMost);
}

}  // namespace

Status check_advertised(const std::vector<wire::Address>& addresses) {
  constexpr std::size_t kMost = kMaxAddresses - 1;
  if (addresses.size() <= kMost) return {};
  return {Code::invalid_argument, "a peer advertises at most " + std::to_string(kMost) +
                                      " addresses, not " + std::to_string(addresses.size())};
}

Result<std::shared_ptr<Runtime>> Runtime::open(RuntimeOptions options) {
  const Status fits = check_advertised(options.advertise);
  if (!fits) return fits.error();
  options.settings.shm = options.settings.shm && os::shares_memory();
  auto congestion = io::Congestion::make(options.settings.tcp_congestion);
  if (!congestion) return congestion.error();
  std::shared_ptr<io::TlsContext> tls;
  if (options.secret) {
    auto made_tls = io::TlsContext::make(io::TlsOptions(options.settings));
    if (!made_tls) return made_tls.error();
    tls = std::move(*made_tls);
  }
  std::unique_ptr<TraceWriter> trace;
  if (!options.settings.trace.empty()) {
    auto opened =
        TraceWriter::open(options.settings.trace, std::uint64_t{options.settings.trace_mb} << 20,
                          options.join.id, options.join.group, options.join.name);
    if (!opened) return opened.error();
    trace = std::move(*opened);
  }
  const auto listening = listen(options.settings.bind_address, options.port);
  if (!listening) return listening.error();
  options.join.addresses = own_addresses(listening->at, options.advertise);
  if (options.settings.shm) options.join.memory_key = MemoryKey::random();
  options.join.ticket = Ticket::random();
  options.join.heartbeats = {in_milliseconds(options.settings.heartbeat_interval),
                             in_milliseconds(options.settings.heartbeat_timeout)};
  options.join.masters = static_cast<std::uint32_t>(options.masters.size());
  std::shared_ptr<Runtime> made(
      new Runtime(std::move(options), std::move(tls), *std::move(congestion), std::move(trace)));
  {
    const io::Turn turn(made->driver_);
    made->peers_.listen(listening->descriptor);
    made->peers_.listen_to_neighbours();
    made->engine_.start(clock_now());
    made->act();
  }
  made->driver_.on_failure([runtime = made.get()](const char* what) {
    runtime->engine_.fail(what);
    runtime->act();
  });
  if (made->peers_.has_neighbours())
    made->driver_.on_idle([runtime = made.get()] { return runtime->step(); });
  made->driver_.start();
  return made;
}

// `paced`: connections on long paths have a congestion control that paces packets.
peer::EngineOptions Runtime::engine_options(bool paced) {
  peer::EngineOptions options;
  options.join = options_.join;
  options.settings = options_.settings;
  options.trace = trace_ != nullptr;
  options.encrypted = static_cast<bool>(options_.secret);
  if (workers_.threads() > 1) {
    options.parallel = &workers_;
    // Each stripe belongs to one thread at a time.
    if (!options_.settings.shm) options.local_stripes = workers_.threads();
  }
  if (paced) options.stripes = kPacedStripes;
  options.stripe_budget = static_cast<std::uint32_t>(io::descriptor_share(options.stripe_budget));
  if (!options_.settings.shm) return options;
  options.locality.make_region = memory::make_region;
  options.locality.find_array = memory::find_array;
  options.locality.poll = [this] { peers_.poll(); };
  options.locality.patience = options_.settings.link_timeout;
  if (cores_ > 0) options.locality.group.cores = cores_;
  return options;
}

// The collective in shared memory, and pipes.
Pace Runtime::step() {
  if (shut_) return Pace::idle;
  // Pipes last: the step before may take in what would wake them.
  const Pace local = engine_.step(clock_now());
  if (engine_.has_actions() || peers_.has_pipe_events()) act();
  Pace pace = local;
  if (peers_.has_pipes()) {
    pace = std::min(local, peers_.step_pipes(local == Pace::idle));  // the more urgent one
    if (engine_.has_actions()) {
      act();
      return Pace::working;  // look at the result before anybody sleeps
    }
  }
  if (pace == Pace::idle) arm_timer({});  // it may have begun to wait for something
  return pace;
}

Runtime::Runtime(RuntimeOptions options, std::shared_ptr<io::TlsContext> tls,
                 io::Congestion congestion, std::unique_ptr<TraceWriter> trace)
    : options_(std::move(options)),
      trace_(std::move(trace)),
      cores_(os::usable_processors()),
      workers_(threads_of(options_.settings, cores_, 0)),
      engine_(engine_options(congestion.paces()),
              std::make_shared<BufferPool>(options_.settings.buffer_bytes,
                                           BufferPool::Pages{os::map_pages, os::unmap_pages})),
      master_(driver_.context(), engine_, options_, tls, [this] { act(); }),
      peers_(driver_.context(), engine_, options_, std::move(tls), std::move(congestion), workers_,
             [this] { act(); }),
      timer_(driver_.context()) {}

Runtime::~Runtime() = default;

void Runtime::shut() {
  driver_.stop();
  toucher_.stop();
  const io::Turn turn(driver_);
  shut_ = true;
  timer_.cancel();
  master_.stop();
  peers_.stop();
  trace_.reset();
}

void Runtime::thread_ended(const std::shared_ptr<Runtime>& runtime, std::uint64_t thread) {
  asio::post(runtime->driver_.context(), [at = runtime.get(), thread] {
    at->engine_.threads().ended(thread);
    at->act();
  });
}

void Runtime::act() {
  bool ended = false;
  while (!shut_ && (engine_.has_actions() || peers_.has_pipe_events())) {
    peers_.take_pipe_events();
    peer::EngineActions actions = engine_.take_actions();
    ended = ended || actions.calls_ended;
    for (const auto& [level, text] : actions.log) log(level, options_.join.name, text, epoch());
    if (!actions.trace.empty() && trace_ != nullptr) trace_->add(std::move(actions.trace));
    if (!actions.touch.empty()) toucher_.add(std::move(actions.touch));
    master_.send(actions.control);
    if (actions.close_control) master_.finish();
    if (actions.dial_control) master_.dial(actions.master);
    for (const std::uint64_t id : actions.resume) {
      link::Stripe* stripe = engine_.stripe(id);
      if (stripe == nullptr) continue;
      if (const Status status = stripe->resume(); !status) {
        engine_.connections(clock_now()).on_stripe_failed(id, status.error());
      } else {
        peers_.resume(id);
      }
    }
    for (const std::uint64_t id : actions.flush) peers_.write(id);
    for (const std::uint64_t id : actions.close) peers_.close(id);
    for (const link::DialRequest& request : actions.dials) peers_.dial(request);
    peers_.carry_out(actions.local);
  }
  peers_.ring_sleepers();
  // With neighbours, step() comes before every sleep.
  arm_timer(peers_.has_neighbours() ? kCoarse : Duration{});
  standing_.store(engine_.standing(), std::memory_order_release);
  draining_.store(engine_.draining(), std::memory_order_release);
  if (between_masters() != engine_.between_masters()) {
    between_masters_.store(engine_.between_masters(), std::memory_order_release);
    ended = true;  // close() may wait for it
  }
  unfinished_.store(engine_.calls().unfinished(), std::memory_order_release);
  join_failures_.store(engine_.control().failures(), std::memory_order_release);
  if (engine_.session().record() != newest_) {
    const std::lock_guard lock(newest_mutex_);
    newest_ = engine_.session().record();
  }
  control_flushed_.store(master_.flushed(), std::memory_order_release);
  if (ended) driver_.notify();
}

// Sets the timer for the next deadline, but not for less than `least` from now.
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
    workers_.resize(threads_of(options_.settings, cores_, engine_.links().local_peers()));
    act();
  });
}

}  // namespace pccl::node
