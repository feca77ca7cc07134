#include "pccl/peer/measuring.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "pccl/collective/schedule.h"
#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"

namespace pccl::peer {
namespace {

constexpr Duration kPingEvery = std::chrono::seconds(5);  // planned links, while no operation runs
constexpr std::size_t kMostProbed = 32;  // a larger group has no time to measure all pairs
// The assumed rate of a host that nobody has measured: 50 Mbit/s. Filler falls short of faster
// lines. With a higher assumption it would fill slow ones.
constexpr std::uint32_t kUsualRate = 6'250;  // kB/s
// Filler before an operation has at most the fourth part of the operation's bytes.
constexpr std::uint64_t kFillerShare = 4;

// The ranks to which this rank sends in an all-reduce. One of an unknown size is a large one.
std::set<std::uint32_t> receivers(const wire::Plan& plan, std::uint32_t rank,
                                  const measured::Announcement& announced) {
  const std::uint64_t bytes =
      announced.bytes > 0 ? announced.bytes : std::numeric_limits<std::uint64_t>::max();
  const collective::Schedule schedule = collective::make_schedule(
      plan, topology::size_class(plan, bytes, false, announced.coded), rank);
  std::set<std::uint32_t> ranks;
  for (const collective::ChunkFlow& flow : schedule.chunks) {
    ranks.insert(flow.partial_to);
    ranks.insert(flow.final_to.begin(), flow.final_to.end());
  }
  ranks.erase(collective::kNobody);
  return ranks;
}

}  // namespace

// Two rounds: in the first one members meet, in the second one they report their measurements.
void Measuring::start(const CallPtr& call) {
  primer_.end();
  CallTable& table = calls_.table();
  const wire::RoundKey key = table.next_round(wire::RoundKind::optimize);
  table.skip_rounds(wire::RoundKind::optimize, key.sequence + kRounds);
  call->key = key;
  round_ = Round{};
  round_->call = call;
  enter(key, wire::Nothing{});
}

void Measuring::enter(const wire::RoundKey& key, wire::RoundPayload payload) {
  if (const auto early = calls_.move_to(round_->call, key)) return end(early->error, early->record);
  calls_.enter(round_->call, key, std::move(payload));
}

void Measuring::on_outcome(const Error& error, const link::LinkContext& context) {
  if (error.code != Code::ok) return end(error, calls_.record());
  if (round_->phase == Round::Phase::meeting) return measure(context);
  end({Code::ok, {}}, calls_.record());
}

void Measuring::measure(const link::LinkContext& context) {
  wire::RoundKey key = round_->key();
  ++key.sequence;
  if (const auto early = calls_.move_to(round_->call, key)) return end(early->error, early->record);
  round_->phase = Round::Phase::measuring;
  // Memory is faster than any network: links within a host are not measured.
  const std::vector<wire::Member>& members = calls_.record()->members;
  std::vector<PeerId> peers;
  for (const wire::Member& member : members) {
    if (member.id == session_.id() || locality_.shares_with(member.id)) continue;
    if (members.size() <= kMostProbed || links_.contains(member.id)) peers.push_back(member.id);
  }
  if (peers.empty() || locality_.active()) return tell(context);
  prober_.begin(peers, options_.probe_bytes, context.now);
  round_->probed.insert(peers.begin(), peers.end());
  links_.begin_probe();
  links_changed_ = true;
}

void Measuring::wake_links() {
  if (!prober_.active() || calls_.record() == nullptr) return;
  for (const wire::Member& member : calls_.record()->members)
    if (prober_.probes(member.id)) links_.wake(member.id);
}

void Measuring::tell(const link::LinkContext& context) {
  wire::Measurements row = prober_.row();
  // The link table reports planned links that are down. Only the peer that dials knows that another
  // link is down. A link that was ever up works.
  for (const wire::Member& member : calls_.record()->members) {
    if (!prober_.probes(member.id) || prober_.answered(member.id)) continue;
    if (links_.never_worked(member.id, context)) row.links.push_back({member.id, {true, 0, 0}});
  }
  prober_.end();
  round_->phase = Round::Phase::telling;
  // Links that are not in the plan are kept: other members may still measure.
  enter(round_->key(), std::move(row));
}

void Measuring::end(Error error, const Record& record) {
  const CallPtr call = round_->call;
  links_changed_ = links_changed_ || !round_->probed.empty();
  round_.reset();
  prober_.end();
  calls_.table().end(call->key);
  calls_.end(*call, std::move(error), record);
}

void Measuring::expect_operation(Instant at, const measured::Announcement& announced) {
  const Record& world = calls_.record();
  if (!world || prober_.active()) return;
  const std::size_t n = world->members.size();
  std::uint32_t mine = 0;
  while (mine < n && world->members[mine].id != session_.id()) ++mine;
  if (mine == n) return;
  std::vector<measured::Primer::Way> ways;
  for (const std::uint32_t rank : receivers(world->plan, mine, announced)) {
    const PeerId& peer = world->members[rank].id;
    const Duration round_trip = links_.round_trip(peer);
    if (round_trip > Duration{} && links_.is_up(peer) && !locality_.shares_with(peer))
      ways.push_back({peer, round_trip, 0, 0, 1});
  }
  const bool measured = world->rates.hosts.size() == n;
  std::uint32_t rate = live_rates_.last_said().up_kilobytes_per_s;
  if (rate == 0 && measured) rate = world->rates.hosts[mine].up_kilobytes_per_s;
  if (rate == 0) {  // the ranks of a host share it
    const auto shares = [&](const wire::Member& one) { return locality_.shares_with(one.id); };
    rate =
        kUsualRate / static_cast<std::uint32_t>(1 + std::ranges::count_if(world->members, shares));
  }
  std::map<PeerId, std::size_t> stripes;
  for (const auto& [peer, count] : links_.stripes_by_peer()) stripes[peer] = count;
  for (measured::Primer::Way& way : ways) {
    const double share = 1000.0 * rate / static_cast<double>(ways.size());
    const auto window = static_cast<std::uint64_t>(share * in_seconds(way.round_trip));
    way.window = std::min(window, options_.probe_bytes);
    way.stripes = std::max<std::size_t>(stripes[way.peer], 1);
    // An all-reduce sends 2 (n - 1) / n of its arrays.
    const std::uint64_t sent = announced.bytes / n * 2 * (n - 1) / ways.size();
    way.most =
        announced.bytes == 0 ? std::numeric_limits<std::uint64_t>::max() : sent / kFillerShare;
  }
  primer_.begin(ways, at);
}

void Measuring::on_time(const link::LinkContext& context) {
  if (prober_.on_time(context.now)) wake_links();
  if (primer_.on_time(context.now)) {
    for (const wire::Member& member : calls_.record()->members) links_.wake(member.id);
  }
  if (measures() && prober_.over(context.now)) tell(context);
}

void Measuring::begin_epoch(const Record& record, Instant now) {
  prober_.keep(record->members);
  live_rates_.forget();
  primer_.end();
  tell_round_trips(now);
}

void Measuring::tell_round_trips(Instant now) {
  const Record& world = calls_.record();
  if (!world) return;
  const wire::Measurements row = measured::first_round_trips(
      world->members, [&](const PeerId& peer) { return links_.round_trip(peer); });
  for (const wire::MeasuredLink& link : row.links) {
    if (!locality_.shares_with(link.to)) live_rates_.on_connection(link.to, link.rate.rtt_us);
  }
  if (!row.links.empty()) tell_rates(now);
}

// Counts bytes on the planned links to other hosts while operations run, and measures round trips
// between operations.
void Measuring::watch(bool reducing, Instant now) {
  const Duration span = now - std::exchange(looked_, now);
  // A late look may mean that this whole process paused.
  const bool in_time = span <= options_.heartbeat_interval / 2;
  const bool counts = std::exchange(reduced_, reducing) && reducing && in_time && !prober_.active();
  const bool filled = prober_.active() || primer_.filling(now);
  const bool pings = !reducing && !filled && now >= next_pings_;
  if (pings) next_pings_ = now + kPingEvery;
  std::vector<measured::LiveRates::Way> ways;
  for (const link::LinkFlow& flow : links_.flows()) {
    if (!flow.network || locality_.shares_with(flow.peer)) continue;
    ways.push_back({flow.peer, flow.sent, flow.received, flow.full});
    if (pings) links_.ping(flow.peer);
  }
  if (!counts || ways.empty()) return live_rates_.skip();
  live_rates_.look(ways, span);
  tell_rates(now);
}

void Measuring::count(const link::Stripe& from, Instant now) {
  if (!prober_.active()) return;
  const auto peer = links_.peer_of(from.id());
  const std::uint64_t bytes = links_.received_since_probe(from.id());
  if (peer && bytes > 0) prober_.on_bytes(*peer, bytes, now);
}

void Measuring::on_pong(const PeerId& peer, const link::FrameHeader& header, bool reducing,
                        Instant now) {
  prober_.on_pong(peer, header, now);
  const auto round_trip = links_.on_pong(peer, header, now);
  // An answer during an operation may have waited behind its data, as one behind filler.
  if (!round_trip || reducing || prober_.active() || primer_.filling(now) || !session_.member())
    return;
  live_rates_.on_round_trip(peer, *round_trip);
  links_.saw_round_trip(peer, *round_trip);
  tell_rates(now);
}

void Measuring::tell_rates(Instant now) {
  const Record& world = calls_.record();
  if (!world) return;
  const std::size_t n = world->members.size();
  if (n > topology::kMaxTable) return;
  std::size_t mine = 0;
  std::map<PeerId, std::size_t> ranks;
  for (std::size_t rank = 0; rank < n; ++rank) {
    ranks[world->members[rank].id] = rank;
    if (world->members[rank].id == session_.id()) mine = rank;
  }
  const wire::RateTable& table = world->rates;
  const bool known = table.hosts.size() == n && table.links.size() == n * n;
  const wire::Measurements news =
      live_rates_.news({known ? table.hosts[mine] : wire::HostRate{},
                        [&](const PeerId& peer) {
                          const auto rank = ranks.find(peer);
                          return known && rank != ranks.end() ? table.links[mine * n + rank->second]
                                                              : wire::LinkRate{};
                        }},
                       now);
  if (news != wire::Measurements{}) session_.say(wire::Measured{news});
}

}  // namespace pccl::peer
