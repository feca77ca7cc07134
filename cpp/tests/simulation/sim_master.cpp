// The master's process in a simulated run.
#include <algorithm>
#include <iterator>
#include <utility>

#include "pccl/digest/ticket.h"
#include "pccl/topology/plan.h"
#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

void MasterHost::start() {
  ++life_;
  master::Options options = world_.master_options;
  options.place = {world_.options.masters, index_};
  master_ = std::make_unique<master::Master>(options, world_.random.next() | 1, 1);
  timer_ = Instant::max();
  world_.network.listen(node(), [this](const ConnectionPtr& connection) { accept(connection); });
  arm();
}

void MasterHost::stop() {
  ++life_;
  master_.reset();
  meetings_.clear();
  relayed_.clear();
  peers_.clear();
  liars_.clear();
  stalled_until_ = {};
  world_.network.kill(node());
}

void MasterHost::stall(Instant until) {
  stalled_until_ = until;
  world_.timeline.at(until, [this, life = life_] {
    if (life != life_) return;
    std::vector<master::ConnectionId> ids;
    for (const auto& [id, peer] : peers_) ids.push_back(id);
    for (const master::ConnectionId id : ids) pump(id);
    arm();
  });
}

void MasterHost::accept(const ConnectionPtr& connection) {
  const master::ConnectionId id = next_connection_++;
  peers_[id].connection = connection;
  connection->on_ready(1, [this, id, life = life_] {
    if (life == life_) pump(id);
  });
  master_->on_connect(id, "h" + std::to_string(connection->node(0)), world_.now());
  settle();
  pump(id);
}

void MasterHost::pump(master::ConnectionId id) {
  if (world_.now() < stalled_until_) return;
  const auto it = peers_.find(id);
  if (it == peers_.end()) return;
  Peer& peer = it->second;
  const ConnectionPtr connection = peer.connection;
  const auto bytes = connection->readable(1);
  if (!bytes.empty()) {
    peer.reader.limit(master_->may_be_long(id) ? wire::kMaxPayload : wire::kMaxFirstPayload);
    peer.reader.feed(bytes);
    connection->consume(1, bytes.size());
    wire::Frame frame;
    while (true) {
      const Result<bool> got = peer.reader.next(frame);
      if (!got) {
        master_->on_garbage(id, got.error(), world_.now());
        break;
      }
      if (!*got) break;
      const auto from = static_cast<std::size_t>(connection->node(0));
      if (from >= 1 && from <= world_.hosts.size()) {
        // Coverage: a message of this kind, and the present state of its sender.
        world_.report.reached.emplace("message " + std::to_string(frame.message.index()),
                                      world_.hosts[from - 1]->state());
      }
      if (world_.tracing() && !std::holds_alternative<wire::Heartbeat>(frame.message)) {
        world_.log(name(), "hears message type " + std::to_string(frame.message.index()) +
                               " from h" + std::to_string(connection->node(0)));
      }
      if (from >= 1 && from <= world_.hosts.size()) measure(*world_.hosts[from - 1], frame.message);
      if (auto* promise = std::get_if<wire::Promise>(&frame.message);
          promise != nullptr && world_.options.bug == Bug::hide_accept) {
        promise->accepted.clear();
      }
      peer.heard = frame.envelope;
      master_->on_frame(id, frame, world_.now());
    }
  }
  if (connection->ended(1)) {
    connection->close(1);
    peers_.erase(id);
    master_->on_disconnect(id, world_.now());
  }
  settle();
}

void MasterHost::settle() {
  for (master::Action& action : master_->take_actions()) {
    if (auto* send = std::get_if<master::Send>(&action)) {
      const auto it = peers_.find(send->to);
      if (it != peers_.end()) {
        it->second.connection->write(1, tamper(send->to, std::move(send->bytes)));
      } else {
        answer_liar(send->to, send->bytes);
      }
    } else if (const auto* close = std::get_if<master::Close>(&action)) {
      if (const auto liar = liars_.extract(close->connection)) {
        master_->on_disconnect(close->connection, world_.now());
        repeat_lie(liar.mapped());
      }
      const auto it = peers_.find(close->connection);
      if (it == peers_.end()) continue;
      if (world_.tracing()) {
        world_.log(name(),
                   "closes the connection of h" + std::to_string(it->second.connection->node(0)));
      }
      it->second.connection->close(1);
      peers_.erase(it);
      master_->on_disconnect(close->connection, world_.now());
    } else if (const auto* expected = std::get_if<master::ExpectRelay>(&action)) {
      expect_relay(*expected);
    } else if (const auto* end = std::get_if<master::EndRelay>(&action)) {
      end_relay(*end);
    } else if (const auto* line = std::get_if<master::LogLine>(&action)) {
      if (line->text.find(": taken over") != std::string::npos) ++world_.report.takeovers;
      if (line->text.find("from another epoch") != std::string::npos) ++world_.report.gave_way;
      if (world_.tracing()) world_.log(name(), line->text);
    }
  }
  arm();
}

// -- relays

void MasterHost::expect_relay(const master::ExpectRelay& expected) {
  meetings_.push_back({expected, {}, {}});
  world_.timeline.after(std::chrono::seconds(5), [this, token = expected.token_of_one] {
    std::erase_if(meetings_,
                  [&](const Meeting& meeting) { return meeting.expected.token_of_one == token; });
  });
}

// A node connects and sends this token.
void MasterHost::open_relay(NodeId from, const RelayToken& token, Through done) {
  const Duration delay =
      world_.random.duration(world_.network.slowness, 4 * world_.network.slowness);
  const Instant free = std::max({world_.now(), world_.network.blocked_until(from, kMasterNode),
                                 world_.network.blocked_until(kMasterNode, from)});
  if (free > world_.now() + std::chrono::seconds(3)) return done(nullptr, 0);
  const auto once = [done = std::move(done), over = std::make_shared<bool>(false)](
                        const ConnectionPtr& connection, int side) {
    if (!std::exchange(*over, true)) return done(connection, side);
    if (connection) connection->close(side);
  };
  world_.timeline.at(free + delay, [this, from, token, once] { put_through(from, token, once); });
  // A node gives up after some time.
  world_.timeline.at(free + delay + std::chrono::seconds(3), [once] { once(nullptr, 0); });
}

void MasterHost::put_through(NodeId from, const RelayToken& token, Through done) {
  const auto it = std::find_if(meetings_.begin(), meetings_.end(), [&](const Meeting& meeting) {
    return meeting.expected.token_of_one == token || meeting.expected.token_of_other == token;
  });
  if (it == meetings_.end()) return done(nullptr, 0);
  const std::size_t side = it->expected.token_of_one == token ? 0 : 1;
  it->nodes[side] = from;
  it->ends[side] = std::move(done);
  if (!it->ends[1 - side]) return;
  const Meeting meeting = std::move(*it);
  meetings_.erase(it);
  const auto connection = world_.network.relay(meeting.nodes[0], meeting.nodes[1], world_.capacity);
  relayed_.emplace_back(std::set{meeting.expected.one, meeting.expected.other}, connection);
  ++world_.report.relayed;
  for (const int end : {0, 1}) {
    world_.timeline.after(world_.random.duration(Duration(0), 2 * world_.network.slowness),
                          [connection, end, told = meeting.ends[static_cast<std::size_t>(end)]] {
                            told(connection, end);
                          });
  }
}

void MasterHost::end_relay(const master::EndRelay& end) {
  for (const auto& [pair, weak] : relayed_) {
    const ConnectionPtr connection = weak.lock();
    if (connection && pair == std::set{end.one, end.other}) connection->cut();
  }
}

void MasterHost::arm() {
  const Instant due = world_.now() + master_->tick();
  if (timer_ <= due && timer_ > world_.now()) return;
  timer_ = due;
  world_.timeline.at(due, [this, due, life = life_] {
    if (life != life_ || due != timer_) return;
    if (world_.now() < stalled_until_) return;  // the end of the stall arms it again
    timer_ = Instant::max();
    master_->on_time(world_.now());
    settle();
  });
}

bool MasterHost::quiet() const {
  if (world_.now() < stalled_until_) return false;
  for (const auto& [id, peer] : peers_) {
    if (!peer.connection->quiet()) return false;
  }
  return true;
}

// Replaces measurements by plausible ones of a real network: links so slow and uneven that shares
// matter even for the few bytes of a simulated operation, and some that are unreachable.
void MasterHost::measure(Host& by, wire::Message& message) {
  Random& random = world_.random;
  const std::uint32_t of = by.group();
  auto* enter = std::get_if<wire::EnterRound>(&message);
  const bool asked = enter != nullptr && enter->entry.key.kind == wire::RoundKind::optimize &&
                     !std::holds_alternative<wire::SyncVote>(enter->entry.payload);
  // A new plan resets the time for which members were blocked.
  const bool unasked =
      std::holds_alternative<wire::Heartbeat>(message) && world_.options.program != Program::stuck;
  const double often = world_.two_sites ? 1 : 0.8;
  if (group(of) == nullptr || !random.chance(asked ? often : unasked ? 0.1 : 0)) return;
  const auto rate = [&] {
    const std::uint32_t rates[] = {0, 1, 1, 2, 5, 20, 1000};
    return rates[random.below(std::size(rates))];
  };
  wire::Measurements row;
  row.total = {rate(), rate()};
  // Members alternate between two sites. In some worlds all links within a site are fast, and the
  // link between the sites is slow.
  const auto site = [](const PeerId& id) { return id.bytes.back() % 2; };
  const bool sites = world_.two_sites;
  if (sites) row.total = {1000, 1000};
  for (const wire::Member& member : group(of)->record().members) {
    const bool near = site(member.id) == site(by.engine().session().id());
    const std::uint32_t rtt = near ? 1'000 : 100'000;
    if (sites) {
      row.links.push_back({member.id, {false, 0, rtt, near ? 200U : 1U}});
    } else if (random.chance(0.05)) {
      row.links.push_back({member.id, {true, 0, 0}});
    } else if (random.chance(0.8)) {
      row.links.push_back({member.id, {false, rate(), random.chance(0.5) ? 0 : rtt}});
    }
  }
  if (asked) {
    enter->entry.payload = std::move(row);
  } else {
    message = wire::Measured{std::move(row)};
  }
}

// -- a peer that says what is not true

void MasterHost::hear_lie(const peer::Session& of) {
  wire::Rejoin lie = of.rejoin();
  lie.id.bytes.fill(0xee);
  lie.ticket.bytes.fill(0xef);
  wire::Member self = lie.record.members.front();
  self.id = lie.id;
  self.seal = digest::seal_of(lie.ticket);
  lie.record.members = {self};
  lie.record.plan = *topology::make_plan(1, world_.master_options.segment_bytes, {});
  lie.record.state.holders.clear();
  lie.record.rates = {};
  lie.record.relayed.clear();
  lie.record.epoch += world_.random.below(3);
  lie.applied += world_.random.below(3);
  hear_lie({{of.run(), of.term(), lie.applied}, std::move(lie)});
}

void MasterHost::hear_lie(const Liar& liar) {
  const master::ConnectionId id = next_connection_++;
  liars_[id] = liar;
  master_->on_connect(id, "elsewhere", world_.now());
  master_->on_frame(id, {liar.said, liar.lie}, world_.now());
  settle();
  liar_lives(id);
}

void MasterHost::repeat_lie(const Liar& liar) {
  world_.timeline.after(std::chrono::milliseconds(100), [this, liar, life = life_] {
    if (life == life_) hear_lie(liar);
  });
}

bool MasterHost::believes_a_lie() const {
  const master::Group* const served = group(0);
  return served != nullptr && std::ranges::any_of(served->record().members, [](const auto& member) {
           return member.id.bytes.front() == 0xee && member.id.bytes.back() == 0xee;
         });
}

void MasterHost::answer_liar(master::ConnectionId to, const wire::Bytes& bytes) {
  const auto it = liars_.find(to);
  if (it == liars_.end()) return;
  wire::FrameReader reader;
  reader.feed(bytes);
  wire::Frame frame;
  while (true) {
    const Result<bool> got = reader.next(frame);
    if (!got || !*got) return;
    it->second.said.term = std::max(it->second.said.term, frame.envelope.term);
    std::optional<wire::Message> answer;
    if (std::holds_alternative<wire::AskPromise>(frame.message)) {
      answer = wire::Promise{};
    } else if (std::holds_alternative<wire::RequestLog>(frame.message)) {
      answer = wire::LogPart{{}, true};
    } else if (const auto* propose = std::get_if<wire::Propose>(&frame.message)) {
      answer = wire::Accept{propose->entry.ordinal};
    } else if (const auto* log = std::get_if<wire::Log>(&frame.message)) {
      it->second.said.ordinal = log->entries.back().ordinal;
    }
    if (!answer) continue;
    world_.timeline.after(Duration(1), [this, to, said = *answer, life = life_] {
      const auto liar = liars_.find(to);
      if (life != life_ || liar == liars_.end()) return;
      master_->on_frame(to, {liar->second.said, said}, world_.now());
      settle();
    });
  }
}

void MasterHost::liar_lives(master::ConnectionId id) {
  world_.timeline.after(std::chrono::seconds(1), [this, id, life = life_] {
    const auto liar = liars_.find(id);
    if (life != life_ || liar == liars_.end()) return;
    if (believes_a_lie())
      master_->on_frame(id, {liar->second.said, wire::Heartbeat{}}, world_.now());
    settle();
    liar_lives(id);
  });
}

// Deliberate bug: the master hears that the member has accepted an epoch.
void MasterHost::forge_accept(master::ConnectionId from, const wire::Propose& proposal) {
  world_.timeline.after(Duration(1), [this, from, ordinal = proposal.entry.ordinal, life = life_] {
    const auto it = peers_.find(from);
    if (life != life_ || it == peers_.end()) return;
    master_->on_frame(from, {it->second.heard, wire::Accept{ordinal}}, world_.now());
    settle();
  });
}

// Deliberate bugs: one member receives another verdict than was decided; see forge_accept.
wire::Bytes MasterHost::tamper(master::ConnectionId to, wire::Bytes bytes) {
  const Bug bug = world_.options.bug;
  if (bug != Bug::other_verdict && bug != Bug::forge_accept) return bytes;
  wire::FrameReader reader;
  reader.feed(bytes);
  wire::Frame frame;
  const Result<bool> got = reader.next(frame);
  if (!got || !*got) return bytes;
  if (const auto* proposal = std::get_if<wire::Propose>(&frame.message);
      proposal != nullptr && bug == Bug::forge_accept) {
    forge_accept(to, *proposal);
  }
  auto* log = std::get_if<wire::Log>(&frame.message);
  if (log == nullptr || bug != Bug::other_verdict) return bytes;
  for (wire::LogEntry& entry : log->entries) {
    auto* verdict = std::get_if<wire::Verdict>(&entry.what);
    if (verdict == nullptr || verdict->code != Code::ok || !world_.bug_due(Bug::other_verdict)) {
      continue;
    }
    verdict->code = Code::peer_lost;
    verdict->reason = "a lie";
  }
  return wire::encode(frame.envelope, frame.message);
}

}  // namespace pccl::simulation
