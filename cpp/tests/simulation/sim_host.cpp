// A peer's process in a simulated run: the shell around an engine, as node/runtime.cpp in a real
// one.
#include <algorithm>
#include <cstring>
#include <utility>

#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {
constexpr std::size_t kUnlimited = std::size_t{1} << 40;  // a control connection is never full
}

Host::Host(World& world, NodeId node, const RankId& rank_id)
    : world_(world), node_(node), rank_id_(rank_id) {
  peer::EngineOptions options;
  options.join.group = rank_id.group;
  options.join.replica = rank_id.replica;
  options.join.ranks_per_replica = world.options.ranks;
  options.join.id = world.new_id();
  options.join.min_peers = 1;
  options.join.waiting = true;
  options.join.start_only = world.options.program != Program::explicit_api;
  options.join.software = "simulated";
  options.join.masters = world.options.masters;
  const wire::Address own{"h" + std::to_string(node), static_cast<std::uint16_t>(node)};
  options.join.addresses = {own};
  if (world.random.chance(0.2)) {
    // An address at which another peer or no peer listens.
    const auto other = static_cast<std::uint32_t>(world.random.below(node + 2));
    const std::string host = world.random.chance(0.5) ? "nowhere" : "h" + std::to_string(other);
    options.join.addresses.insert(options.join.addresses.begin(),
                                  wire::Address{host, static_cast<std::uint16_t>(other)});
  }
  // Machines with several networks have several addresses.
  for (std::uint64_t more = world.random.chance(0.3) ? 1 + world.random.below(3) : 0; more > 0;
       --more)
    options.join.addresses.push_back(own);
  options.settings = world.settings;
  options.join.ticket = {options.join.id.bytes};
  if (world.options.machines > 0) {
    machine_ = static_cast<std::uint32_t>(world.random.below(world.options.machines));
    if (world.random.chance(0.97)) memory_key_ = options.join.memory_key = {world.new_id().bytes};
    if (!memory_key_.empty()) options.locality = memory_.options();
  }
  if (world.options.hidden > 0) {
    // Peers of one machine are behind the same NAT.
    const std::uint32_t home = machine_ + 1 + (world.options.machines > 0 ? 0 : node);
    Random draw(world.seed() ^ (0x4a7 * home));
    if (draw.below(100) < world.options.hidden) world.network.hide(node, home);
  }
  options.eager_bytes = world.eager_bytes;
  options.eager_room = world.eager_room;
  options.stripes = world.stripes;
  options.probe_bytes = 1000;
  engine_ = std::make_unique<peer::Engine>(options, world.pool);
  if (world.options.patience > 0)
    engine_->wait_no_longer_than({600, world.options.patience}, world.now());
  program_ = std::make_unique<UserProgram>(*this);
}

Host::~Host() = default;

std::string Host::name() const {
  return "h" + std::to_string(node_) + "(" + engine_->session().id().brief() +
         (rank_id_.replica.empty()
              ? ")"
              : " " + rank_id_.replica + "." + std::to_string(rank_id_.group) + ")");
}

// Calls of different groups are distinct.
std::uint64_t Host::run_id() const {
  return engine_->session().run() + rank_id_.group * 0x9e3779b97f4a7c15;
}

void Host::program_is_over(bool well) {
  program_over_ = true;
  ended_well_ = well;
  ended_at_ = world_.now();
  world_.rank_ended(*this);
}

std::string Host::state() const {
  if (!alive_) return "dead";
  switch (engine_->standing()) {
    case peer::Standing::joining:
      return "joining";
    case peer::Standing::newcomer:
      return "newcomer";
    case peer::Standing::out:
      return "out";
    case peer::Standing::member:
      break;
  }
  std::string state = "member";
  if (control_ == nullptr) state += ", no master";
  if (engine_->calls().unfinished() > 1) return state + ", in operations";
  if (engine_->calls().unfinished() == 1) return state + ", in an operation";
  for (const RoundEntry& round : rounds_) {
    if (!round.call->done) return state + ", in a round";
  }
  if (syncing_ && !syncing_->call->done) {
    const auto& key = std::get<wire::RoundKey>(syncing_->call->key);
    if (key.kind == wire::RoundKind::sync) return state + ", voting";
    if (key.kind == wire::RoundKind::sync_detail) return state + ", comparing";
    return state + (syncing_->call->bytes_done < syncing_->call->bytes_wanted ? ", receiving state"
                                                                              : ", ending a sync");
  }
  return state;
}

void Host::start() {
  world_.network.listen(node_, [this](const ConnectionPtr& connection) {
    run([this, connection] {
      const std::uint64_t stripe = next_stripe_++;
      adopt(stripe, connection, 1);
      Host* const dialler = connection->memory() ? world_.host_at(connection->node(0)) : nullptr;
      engine_->connections(world_.now())
          .on_accepted(
              stripe,
              {.local = connection->local(),
               .round_trip = connection->round_trip(),
               .neighbour = dialler == nullptr ? PeerId{} : dialler->engine().session().id()});
      settle();
      pump(stripe);
    });
  });
  engine_->start(world_.now());
  settle();
  program_->start();
  settle();
}

void Host::kill() {
  alive_ = false;
  ended_at_ = world_.now();
  world_.rank_ended(*this);
  frozen_ = false;
  deferred_.clear();
  waiters_.clear();
  program_.reset();
  stripes_.clear();
  control_.reset();
  memory_.kill();
  world_.network.kill(node_);
}

void Host::freeze() { frozen_ = true; }

void Host::resume() {
  if (!frozen_) return;
  frozen_ = false;
  world_.log(name(), "goes on");
  std::deque<std::function<void()>> deferred = std::exchange(deferred_, {});
  for (const auto& what : deferred) run(what);
  if (!alive_) return;
  pump_all();
  engine_->on_time(world_.now());
  settle();
}

void Host::run(std::function<void()> what) {
  if (!alive_) return;
  if (frozen_) {
    deferred_.push_back(std::move(what));
  } else {
    what();
  }
}

// -- stripes

void Host::adopt(std::uint64_t stripe, const ConnectionPtr& connection, int side) {
  Link& link = stripes_[stripe];
  link.connection = connection;
  link.side = side;
  connection->on_ready(side, [this, stripe] {
    if (!frozen_ && alive_) pump(stripe);
  });
}

void Host::pump_all() {
  pump_control();
  std::vector<std::uint64_t> ids;
  for (const auto& [id, link] : stripes_) ids.push_back(id);
  for (const std::uint64_t id : ids) pump(id);
}

void Host::pump(std::uint64_t stripe) {
  if (!alive_ || frozen_) return;
  auto it = stripes_.find(stripe);
  if (it == stripes_.end()) return;
  read(stripe, it->second);
  settle();
  it = stripes_.find(stripe);
  if (it == stripes_.end()) return;
  write(stripe, it->second);
  settle();
}

void Host::read(std::uint64_t id, Link& link) {
  while (link.connection->open(link.side)) {
    link::Stripe* stripe = engine_->stripe(id);
    if (stripe == nullptr) return;
    const auto bytes = link.connection->readable(link.side);
    if (bytes.empty()) {
      if (link.connection->ended(link.side)) {
        engine_->connections(world_.now())
            .on_stripe_failed(id, {Code::unreachable, "the connection ended"});
      }
      return;
    }
    engine_->at(world_.now());
    const auto parts = stripe->incoming();
    if (parts.empty()) return;  // held
    std::size_t room = 0;
    for (const iovec& part : parts) room += part.iov_len;
    std::size_t count = std::min(room, bytes.size());
    if (world_.random.chance(world_.network.chatter)) count = world_.random.between(1, count);
    std::size_t taken = 0;
    for (const iovec& part : parts) {
      const std::size_t size = std::min(part.iov_len, count - taken);
      if (size == 0) continue;
      std::memcpy(part.iov_base, bytes.data() + taken, size);
      taken += size;
    }
    link.connection->consume(link.side, count);
    stripe->check(count);
    const Status status = stripe->received(count);
    if (!status) {
      if (status.error().reason.find("checksum") != std::string::npos) {
        ++world_.report.checksum_drops;
      }
      if (world_.tracing()) world_.log(name(), "drops a stripe: " + status.error().reason);
      engine_->connections(world_.now()).on_stripe_failed(id, status.error());
      return;
    }
  }
}

void Host::write(std::uint64_t id, Link& link) {
  while (const std::size_t room = link.connection->room(link.side)) {
    link::Stripe* stripe = engine_->stripe(id);
    if (stripe == nullptr) return;
    engine_->at(world_.now());
    const auto parts = stripe->outgoing();
    std::size_t total = 0;
    for (const iovec& part : parts) total += part.iov_len;
    if (total == 0) return;
    std::size_t count = std::min(room, total);
    if (world_.random.chance(world_.network.chatter)) count = world_.random.between(1, count);
    wire::Bytes bytes;
    bytes.reserve(count);
    for (const iovec& part : parts) {
      const std::size_t size = std::min(part.iov_len, count - bytes.size());
      const auto* from = static_cast<const std::uint8_t*>(part.iov_base);
      bytes.insert(bytes.end(), from, from + size);
    }
    stripe->sent(count);
    follow_frames(link, bytes);
    link.connection->write(link.side, std::move(bytes));
  }
}

// Finds the bytes of data frames with a checksum, and corrupts one on request.
void Host::follow_frames(Link& link, wire::Bytes& bytes) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    if (link.payload_left > 0) {
      const std::size_t size = std::min(link.payload_left, bytes.size() - at);
      if (corrupt_ && link.checked) {
        corrupt_ = false;
        bytes[at + world_.random.below(size)] ^=
            static_cast<std::uint8_t>(1U << world_.random.below(8));
        world_.log(name(), "a byte of its data is spoilt under way");
      }
      at += size;
      link.payload_left -= size;
      continue;
    }
    if (link.trailer_left > 0) {
      const std::size_t size = std::min(link.trailer_left, bytes.size() - at);
      at += size;
      link.trailer_left -= size;
      continue;
    }
    const std::size_t size = std::min(link.header.size() - link.header_filled, bytes.size() - at);
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), size,
                link.header.begin() + static_cast<std::ptrdiff_t>(link.header_filled));
    link.header_filled += size;
    at += size;
    if (link.header_filled < link.header.size()) return;
    link.header_filled = 0;
    const auto header = link::decode(link.header);
    if (corrupt_ && header && header->checksum != 0 && world_.random.chance(0.2)) {
      corrupt_ = false;
      const std::uint64_t back = world_.random.between(1, size);
      bytes[at - back] ^= static_cast<std::uint8_t>(1U << world_.random.below(8));
      world_.log(name(), "a byte of a header is spoilt under way");
    }
    if (!header) return world_.checks.fail("I6", name() + " writes a malformed frame header");
    const bool data = link::carries_data(header->type);
    link.payload_left = header->payload_bytes;
    link.trailer_left = data ? link::kTrailerBytes : 0;
    link.checked = data && header->checksum != 0;
  }
}

// -- the control connection

void Host::dial_control(std::uint32_t index) {
  const NodeId to = world_.master_at(index).node();
  world_.network.dial(node_, to, kUnlimited, [this](const ConnectionPtr& connection) {
    if (!alive_) {
      if (connection) connection->close(0);
      return;
    }
    run([this, connection] {
      if (!connection) {
        engine_->on_control_lost("connection refused", world_.now());
        return settle();
      }
      if (engine_->standing() == peer::Standing::out) return connection->close(0);
      if (control_) control_->close(0);
      control_ = connection;
      connection->on_ready(0, [this] {
        if (!frozen_ && alive_) pump_control();
      });
      engine_->on_control_open(world_.now());
      settle();
      pump_control();
    });
  });
}

void Host::pump_control() {
  while (control_ && control_->open(0)) {
    const auto bytes = control_->readable(0);
    if (bytes.empty()) break;
    std::size_t count = bytes.size();
    if (world_.random.chance(world_.network.chatter)) count = world_.random.between(1, count);
    const wire::Bytes taken(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
    control_->consume(0, count);
    engine_->on_control_bytes(taken, world_.now());
    settle();
  }
  if (control_ && control_->ended(0)) {
    control_->close(0);
    control_.reset();
    engine_->on_control_lost("the connection ended", world_.now());
    settle();
  }
}

// -- the engine's actions

void Host::dial(const link::DialRequest& request) {
  const auto connected = [this, token = request.token, neighbour = request.neighbour](
                             const ConnectionPtr& connection, int side) {
    if (!alive_) {
      if (connection) connection->close(side);
      return;
    }
    run([this, token, neighbour, connection, side] {
      if (!connection) {
        engine_->connections(world_.now()).on_dial_failed(token, "refused");
        return settle();
      }
      const std::uint64_t stripe = next_stripe_++;
      adopt(stripe, connection, side);
      engine_->connections(world_.now())
          .on_dialled(token, stripe,
                      {.local = connection->local(),
                       .round_trip = connection->round_trip(),
                       .neighbour = neighbour});
      settle();
      pump(stripe);
    });
  };
  if (!request.relay.empty()) return world_.master.open_relay(node_, request.relay, connected);
  const bool memory = !request.neighbour.empty();
  Host* const neighbour = memory ? world_.host_of(request.neighbour) : nullptr;
  NodeId to = kNowhere;
  if (!memory) {
    to = world_.node_at(request.address).value_or(kNowhere);
  } else if (neighbour != nullptr && memory_.knows(request.neighbour)) {
    to = neighbour->node();
  }
  world_.network.dial(
      node_, to, world_.capacity,
      [connected](const ConnectionPtr& connection) { connected(connection, 0); }, memory);
}

bool Host::carry_out(peer::EngineActions actions) {
  bool busy = !actions.control.empty() || !actions.flush.empty() || !actions.resume.empty() ||
              !actions.close.empty();
  for (wire::Bytes& bytes : actions.control) {
    if (world_.options.bug == Bug::lose_report && bytes[5] == 5 &&
        world_.bug_due(Bug::lose_report)) {
      continue;
    }
    if (control_) control_->write(0, std::move(bytes));
  }
  if (actions.close_control && control_) {
    control_->close(0);
    control_.reset();
  }
  if (actions.dial_control) dial_control(actions.master);
  for (const link::DialRequest& request : actions.dials) dial(request);
  for (const std::uint64_t id : actions.close) {
    const auto it = stripes_.find(id);
    if (it == stripes_.end()) continue;
    it->second.connection->close(it->second.side);
    stripes_.erase(it);
  }
  for (const std::uint64_t id : actions.resume) {
    const auto it = stripes_.find(id);
    link::Stripe* stripe = engine_->stripe(id);
    if (it == stripes_.end() || stripe == nullptr) continue;
    engine_->at(world_.now());
    const Status status = stripe->resume();
    if (!status) {
      engine_->connections(world_.now()).on_stripe_failed(id, status.error());
      continue;
    }
    read(id, it->second);
  }
  for (const std::uint64_t id : actions.flush) {
    const auto it = stripes_.find(id);
    if (it != stripes_.end()) write(id, it->second);
  }
  if (!actions.local.empty()) memory_.carry_out(actions.local);
  for (const auto& [level, text] : actions.log) {
    if (text.starts_with("a master says")) ++world_.report.doubts;
    if (world_.tracing()) world_.log(name(), text);
  }
  return busy;
}

void Host::settle() {
  if (!alive_ || settling_) return;
  settling_ = true;
  while (carry_out(engine_->take_actions())) {
  }
  settling_ = false;
  if (syncing_ && syncing_->call && syncing_->call->asks) answer_later(syncing_->call);
  world_.checks.after_event(*this);
  arm();
  wake();
  memory_.want_step();
}

void Host::arm() {
  if (engine_->standing() == peer::Standing::out) return;
  const Instant due = std::max(engine_->next_deadline(), world_.now() + microseconds(50));
  if (timer_ <= due) return;
  timer_ = due;
  world_.timeline.at(due, [this, due] {
    run([this, due] {
      if (timer_ == due) timer_ = Instant::max();
      engine_->on_time(world_.now());
      settle();
    });
  });
}

// -- user programs

void Host::wake() {
  for (Waiter& waiter : waiters_) {
    if (waiter.woken || !waiter.holds()) continue;
    waiter.woken = true;
    // A thread runs only some time after it was woken.
    const Duration delay = world_.random.chance(0.7)
                               ? Duration(0)
                               : world_.random.duration(Duration(0), milliseconds(2));
    world_.timeline.after(delay, [this, handle = waiter.handle] {
      run([this, handle] {
        std::erase_if(waiters_, [&](const Waiter& other) { return other.handle == handle; });
        handle.resume();
        settle();
      });
    });
  }
}

void Host::Sleep::await_suspend(std::coroutine_handle<> handle) const {
  Host* const process = &host;
  process->world_.timeline.after(duration, [process, handle] {
    process->run([process, handle] {
      handle.resume();
      process->settle();
    });
  });
}

ReductionPtr Host::reduce(ReductionPtr reduction, peer::OperationRequest request) {
  for (ArrayData& array : reduction->arrays) {
    request.arrays.push_back(
        {array.send.data(), array.in_place ? array.send.data() : array.recv.data(), array.count,
         array.dtype, array.left_out.empty() ? nullptr : array.left_out.data()});
  }
  reduction->since = world_.now();
  reduction->run = run_id();
  if (world_.options.bug == Bug::touch_input &&
      world_.now() > Instant(std::chrono::seconds(1000))) {
    const bool alone =
        engine_->session().record() && engine_->session().record()->members.size() < 2;
    if (!alone && !reduction->arrays.front().send.empty() && world_.bug_due(Bug::touch_input)) {
      world_.timeline.after(Duration(1), [this, reduction] {
        run([this, reduction] {
          reduction->arrays.front().send.front() ^= 1;
          settle();
        });
      });
    }
  }
  memory_.lay_out(reduction);
  // The checks must know the input before the operation can end.
  reductions_.push_back(reduction);
  reduction->call = engine_->start_operation(std::move(request), world_.now());
  world_.checks.started(*this, *reduction);
  if (world_.tracing()) {
    world_.log(name(), "calls " + wire::describe(reduction->call->key) + ", " +
                           std::to_string(reduction->arrays.front().values.size()) + " elements");
  }
  return reduction;
}

SyncingPtr Host::sync(UserState& state, bool standing) {
  syncing_ = std::make_shared<Syncing>();
  syncing_->standing = standing;
  syncing_->before = state;
  syncing_->live = &state;
  syncing_->run = run_id();
  syncing_->since = world_.now();
  std::vector<state::LocalEntry> entries;
  for (auto& [name, bytes] : state) {
    state::LocalEntry entry;
    entry.what.name = name;
    entry.what.kind = "uint8";
    entry.what.shape = {bytes.size()};
    entry.what.bytes = bytes.size();
    entry.data = bytes.data();
    if (world_.random.chance(0.7)) entry.writable = bytes.data();
    entries.push_back(std::move(entry));
  }
  Serial serial;
  const auto hashed = state::hash(std::move(entries), serial, {});
  wire::SyncVote vote;
  vote.owned = true;
  vote.mixed = mixed_ == state;
  (*hashed)->overwrite = world_.random.chance(0.3);
  syncing_->hashes = *hashed;
  if (!vote.mixed) world_.checks.brings(*syncing_);
  memory_.lay_out(syncing_);
  syncing_->call = engine_->start_sync({*hashed, vote, world_.random.chance(0.5)}, world_.now());
  if (world_.tracing()) world_.log(this->name(), "calls " + wire::describe(syncing_->call->key));
  settle();
  return syncing_;
}

// The user's thread inspects the entries to be received, and sometimes rejects them.
void Host::answer_later(const peer::CallPtr& call) {
  if (engine_->take_question(call).empty()) return;
  Error answer{Code::ok, {}};
  if (world_.random.chance(0.02)) answer = {Code::mismatched_call, "it has no place here"};
  const Duration delay = world_.random.duration(Duration(0), milliseconds(20));
  world_.timeline.after(delay, [this, call, answer] {
    run([this, call, answer] {
      engine_->answer(call, answer, world_.now());
      settle();
    });
  });
}

peer::CallPtr Host::enter(wire::RoundKind kind, wire::RoundPayload payload) {
  RoundEntry round;
  round.call = kind == wire::RoundKind::optimize
                   ? engine_->start_optimize(world_.now())
                   : engine_->enter(kind, world_.now(), std::move(payload));
  round.run = run_id();
  round.since = world_.now();
  rounds_.push_back(round);
  if (world_.tracing()) world_.log(name(), "enters " + wire::describe(round.call->key));
  return round.call;
}

}  // namespace pccl::simulation
