#include "pccl/master/newcomers.h"

#include <algorithm>
#include <utility>

#include "pccl/base/name.h"
#include "pccl/base/text.h"
#include "pccl/base/utf8.h"

namespace pccl::master {
namespace {

// Peers that join within this time of each other were perhaps meant to start together.
constexpr Duration kTogether = std::chrono::seconds(10);
constexpr const char* kHowTogether =
    "To start peers together, let them wait for each other with min_peers (PCCL_MIN_PEERS, or "
    "`pccl master --min-peers N`)";

std::string seconds(std::uint32_t milliseconds) {
  std::string text = std::to_string(milliseconds / 1000);
  if (milliseconds % 1000 == 0) return text;
  text += "." + std::to_string(1000 + milliseconds % 1000).substr(1);
  return text.substr(0, text.find_last_not_of('0') + 1);
}

// Why one of the two would take the other for dead. A sign of life comes up to a quarter of the
// interval late.
std::optional<std::string> clash(const wire::Heartbeats& joining, const std::string& other,
                                 const wire::Heartbeats& others) {
  const auto late = [](const wire::Heartbeats& sent, const wire::Heartbeats& awaited) {
    return 5 * std::uint64_t{sent.interval_ms} > 4 * std::uint64_t{awaited.timeout_ms};
  };
  const auto sentence = [](const std::string& sender, std::uint32_t interval,
                           const std::string& receiver, std::uint32_t timeout) {
    return sender + " gives a sign of life every " + seconds(interval) +
           " s (its PCCL_HEARTBEAT_INTERVAL), and silence of " + seconds(timeout) +
           " s means death to " + receiver +
           " (its PCCL_HEARTBEAT_TIMEOUT); set both alike on the master and all peers";
  };
  if (late(joining, others))
    return sentence("this peer", joining.interval_ms, other, others.timeout_ms);
  if (late(others, joining))
    return sentence(other, others.interval_ms, "this peer", joining.timeout_ms);
  return std::nullopt;
}

}  // namespace

// -- joining and leaving

std::optional<std::string> Newcomers::refusal_of(const wire::Join& join, const Seal& seal) const {
  const Limits& limits = context_.options.limits;
  if (peers_.members.size() + peers_.candidates.size() >= limits.max_peers) {
    return "group " + std::to_string(context_.id) + " is full (" +
           plural(limits.max_peers, "peer") + ")";
  }
  const bool taken = std::ranges::any_of(peers_.candidates, [&](const Peer& other) {
    return other.member.id == join.id && other.member.seal != seal;
  });
  if (join.id.empty() || peers_.member(join.id) != nullptr || taken)
    return "peer id " + join.id.brief() + " is in use";
  if (!join.name.empty() && !valid_name(join.name))
    return "the name of a peer is " + std::string(kNameRule);
  std::size_t bytes = 0;
  for (const wire::Address& address : join.addresses) bytes += address.host.size();
  // One more: the address that the master has added.
  if (join.addresses.size() > kMaxAddresses + 1 || bytes > kMaxAddressBytes) {
    return "a peer has at most " + plural(kMaxAddresses, "address", "es") + " of " +
           plural(kMaxAddressBytes, "byte") + " in all";
  }
  const wire::Heartbeats master{in_milliseconds(context_.options.heartbeat_interval),
                                in_milliseconds(context_.options.heartbeat_timeout)};
  if (auto why = clash(join.heartbeats, "the master", master)) return why;
  for (const auto* peers : {&peers_.members, &peers_.candidates}) {
    // Nobody has let newcomers in yet, so they count only for those that would found a group.
    if (peers == &peers_.candidates && !peers_.members.empty()) break;
    for (const Peer& other : *peers) {
      if (other.connection == 0) continue;  // it may never return
      const std::string name = "peer " + peers_.shown(other.member.id);
      if (auto why = clash(join.heartbeats, name, other.heartbeats)) return why;
    }
  }
  return std::nullopt;
}

bool Newcomers::add(ConnectionId connection, const wire::Join& join, const Seal& seal,
                    const std::string& seen, Instant now) {
  if (const auto refusal = refusal_of(join, seal)) {
    context_.around.send(connection, 0, wire::Refused{Code::refused, *refusal});
    context_.around.close(connection);
    return false;
  }
  // A newcomer may join again before the master notices that its connection broke. The new
  // connection replaces the old one.
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.member.id == join.id) context_.around.close(candidate.connection);
  }
  std::erase_if(peers_.candidates,
                [&](const Peer& candidate) { return candidate.member.id == join.id; });
  if (peers_.empty()) peers_.ranks_per_replica = join.ranks_per_replica;
  const bool started =
      peers_.ranks_per_replica > 0 ? context_.around.replicas().started() : !peers_.members.empty();
  Peer peer;
  peer.member = {join.id,        context_.around.next_join_ordinal(),
                 join.addresses, join.memory_key,
                 join.replica,   seal,
                 join.name};
  peer.connection = connection;
  peer.heard = now;
  peer.since = now;
  peer.software = shortened(join.software, kShortText);
  peer.heartbeats = join.heartbeats;
  peer.member.min_peers = std::max(1U, join.min_peers);
  peer.order = join.order;
  peer.waiting = join.waiting && !(join.start_only && started);
  peer.start_only = join.start_only;
  peer.seen = seen;
  const std::uint64_t joined = peer.member.joined;
  peers_.candidates.push_back(std::move(peer));
  context_.around.send(connection, 0,
                       wire::Welcome{joined, started, started ? 0 : missing(), seen});
  if (!peers_.members.empty()) {
    announce();
    tell_paused(peers_.candidates.back());
    tell_lone_founder(now);
  } else if (const std::uint32_t more = missing(); more > 0 && peers_.ranks_per_replica == 0) {
    const auto waiting = std::ranges::count(peers_.candidates, true, &Peer::waiting);
    context_.note("waits to start: " + plural(static_cast<std::size_t>(waiting), "peer") +
                  " here, " + std::to_string(more) + " more needed");
  }
  return true;
}

void Newcomers::warn_namesake(ConnectionId connection) {
  const Peer* peer = peers_.on(connection);
  if (peer == nullptr || peer->member.replica.empty()) return;
  const auto has_name = [&](const Peer& other) {
    return other.member.replica == peer->member.replica && other.member.id != peer->member.id;
  };
  if (std::ranges::none_of(peers_.members, has_name) &&
      std::ranges::none_of(peers_.candidates, has_name))
    return;
  context_.around.send(
      connection, 0,
      wire::Notice{"another peer is rank " + std::to_string(context_.id) +
                   " of a replica named \"" + peer->member.replica +
                   "\" already; this one waits until that one has left. Two replicas "
                   "need two names"});
}

wire::Member Newcomers::drop(const Peer& newcomer) {
  wire::Member gone = newcomer.member;
  peers_.drop_candidate(newcomer.connection);
  announce();
  return gone;
}

void Newcomers::tell(const std::string& replica, const std::string& text) {
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.member.replica == replica)
      context_.around.send(candidate.connection, 0, wire::Notice{text});
  }
}

void Newcomers::tell_paused(const Peer& newcomer) const {
  if (!newcomer.waiting || peers_.members.empty() || !context_.around.admission_paused()) return;
  context_.around.send(
      newcomer.connection, 0,
      wire::Notice{"the operator has paused admission: this peer waits until it is resumed"});
}

void Newcomers::admission_changed() const {
  announce();
  for (const Peer& candidate : peers_.candidates) tell_paused(candidate);
}

// -- founding

std::uint32_t Newcomers::missing() const {
  if (peers_.ranks_per_replica > 0) return context_.around.replicas().missing();
  std::uint32_t wanted = context_.min_peers();
  std::uint32_t present = 0;
  for (const Peer& candidate : peers_.candidates) {
    if (!candidate.waiting) continue;
    ++present;
    wanted = std::max(wanted, candidate.member.min_peers);
  }
  return wanted > present ? wanted - present : 0;
}

std::vector<Peer> Newcomers::take_founders() {
  std::vector<Peer> founders;
  if (missing() > 0) return founders;
  for (std::size_t at = 0; at < peers_.candidates.size();) {
    if (peers_.candidates[at].waiting) {
      founders.push_back(peers_.take_candidate(at, log_.last()));
    } else {
      ++at;
    }
  }
  std::ranges::stable_sort(founders,
                           [](const Peer& a, const Peer& b) { return a.order < b.order; });
  return founders;
}

std::vector<Peer> Newcomers::take_founders(const std::vector<std::string>& replicas) {
  std::vector<Peer> founders;
  for (const std::string& replica : replicas) {
    const auto first = std::ranges::find_if(peers_.candidates, [&](const Peer& candidate) {
      return candidate.waiting && candidate.member.replica == replica;
    });
    if (first == peers_.candidates.end()) continue;
    founders.push_back(peers_.take_candidate(
        static_cast<std::size_t>(first - peers_.candidates.begin()), log_.last()));
  }
  return founders;
}

void Newcomers::leave_behind() {
  for (Peer& candidate : peers_.candidates) {
    if (!candidate.waiting || !candidate.start_only) continue;
    candidate.waiting = false;
    context_.around.send(candidate.connection, 0,
                         wire::Welcome{candidate.member.joined, true, 0, candidate.seen});
  }
}

void Newcomers::founded(Instant now) {
  // Founders in the explicit API always start alone and admit each other.
  if (peers_.members.size() != 1 || !peers_.members.front().start_only) return alone_since_.reset();
  alone_since_ = now;
  if (!others_at_ || now - *others_at_ >= kTogether) return;
  context_.around.send(peers_.members.front().connection, log_.collected(),
                       wire::Notice{"this peer has started group " + std::to_string(context_.id) +
                                    " alone, and another one has just left. " + kHowTogether});
}

// Tells a peer that it has started alone although others join at about the same time.
void Newcomers::tell_lone_founder(Instant now) {
  if (!alone_since_ || peers_.members.size() != 1 || now - *alone_since_ >= kTogether) return;
  alone_since_.reset();
  context_.around.send(peers_.members.front().connection, log_.collected(),
                       wire::Notice{"this peer has started group " + std::to_string(context_.id) +
                                    " alone, and another one has joined since. It is admitted at "
                                    "pccl.admit() or pccl.sync(). " +
                                    kHowTogether});
}

// -- admission

bool Newcomers::ready(const Peer& candidate) const {
  return connected(candidate) && !context_.around.admission_paused();
}

bool Newcomers::any_ready() const {
  if (peers_.ranks_per_replica > 0)
    return context_.around.replicas().wait(context_.id,
                                           wire::next_point(record_, wire::RoundKind::admit));
  return std::ranges::any_of(peers_.candidates,
                             [&](const Peer& candidate) { return ready(candidate); });
}

void Newcomers::prepared(Peer& newcomer, const wire::Prepared& prepared) {
  const bool before = any_ready();
  const std::set<PeerId> without(prepared.without.begin(), prepared.without.end());
  // A link that the master has not accepted as unreachable may still be established.
  if (!std::ranges::includes(newcomer.unreachable, without)) return;
  newcomer.unreachable = without;
  newcomer.prepared_epoch = prepared.epoch;
  if (any_ready() != before) announce();
  context_.around.replicas().changed();
}

wire::Expect Newcomers::expected() const {
  wire::Expect expect;
  for (const Peer& candidate : peers_.candidates) {
    if (!candidate.waiting) continue;
    expect.newcomers.push_back(candidate.member);
  }
  expect.ready = any_ready();
  return expect;
}

void Newcomers::announce() const {
  if (peers_.members.empty()) return;
  const wire::Expect expect = expected();
  // Members first: they must know the newcomers that connect to them.
  for (const Peer& peer : peers_.members) {
    if (peer.connection != 0) context_.around.send(peer.connection, log_.collected(), expect);
  }
  const wire::Prepare prepare{record_.epoch, record_.members};
  for (const Peer& candidate : peers_.candidates) {
    if (candidate.waiting && candidate.prepared_epoch != record_.epoch) {
      context_.around.send(candidate.connection, 0, prepare);
    }
  }
}

void Newcomers::enter(const std::vector<std::string>& replicas) {
  const auto let_in = [&](const std::string& replica) {
    for (std::size_t at = 0; at < peers_.candidates.size();) {
      const Peer& candidate = peers_.candidates[at];
      // Check fits() for each newcomer: two may fit alone but not together.
      const bool may_enter =
          replica.empty() ? ready(candidate) && planning_.fits(candidate) : connected(candidate);
      if (may_enter && candidate.member.replica == replica) {
        peers_.members.push_back(peers_.take_candidate(at, log_.last()));
        peers_.members.back().member.min_peers = 1;  // the group has started without it
        const PeerId id = peers_.members.back().member.id;
        for (const PeerId& other : std::exchange(peers_.members.back().unreachable, {}))
          links_.avoid(pair_of(id, other));
        if (!replica.empty()) return;  // one rank per replica
      } else {
        ++at;
      }
    }
  };
  if (peers_.ranks_per_replica == 0) let_in({});
  for (const std::string& replica : replicas) let_in(replica);
}

}  // namespace pccl::master
