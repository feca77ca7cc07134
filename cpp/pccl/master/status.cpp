// The status of the run, for operators: what the tables of the groups know.
#include <algorithm>
#include <map>
#include <utility>

#include "pccl/base/utf8.h"
#include "pccl/base/version.h"
#include "pccl/master/operators.h"
#include "pccl/wire/address.h"

namespace pccl::master {
namespace {

std::uint64_t ms(Duration duration) {
  const auto count = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count();
  return count > 0 ? static_cast<std::uint64_t>(count) : 0;
}

std::string address_of(const wire::Member& member) {
  if (member.addresses.empty()) return {};
  const wire::Address& first = member.addresses.front();
  return wire::to_string({shortened(first.host, kShownText), first.port});
}

using Ranks = std::map<PeerId, std::uint32_t>;

template <class Entered>
wire::CallStatus call_status(const wire::CallKey& key, Instant opened, const Entered& entered,
                             const Peers& peers, Instant now) {
  wire::CallStatus status{wire::describe(key), {}, ms(now - opened), {}, {}};
  for (std::uint32_t rank = 0; rank < peers.members.size(); ++rank) {
    const bool in = entered.contains(peers.members[rank].member.id);
    (in ? status.entered : status.missing).push_back(rank);
  }
  return status;
}

// The calls that are open for longest.
std::vector<wire::CallStatus> calls_of(const OpenCalls& calls, const Peers& peers, Instant now) {
  std::vector<std::pair<Instant, wire::CallKey>> oldest;
  for (const auto& [key, operation] : calls.operations())
    oldest.emplace_back(operation.opened, key);
  for (const auto& [key, round] : calls.rounds()) oldest.emplace_back(round.opened, key);
  const std::size_t shown = std::min(oldest.size(), kShownCalls);
  std::partial_sort(oldest.begin(), oldest.begin() + static_cast<std::ptrdiff_t>(shown),
                    oldest.end());
  oldest.resize(shown);
  std::vector<wire::CallStatus> list;
  for (const auto& [opened, key] : oldest) {
    if (const auto* round = std::get_if<wire::RoundKey>(&key)) {
      list.push_back(call_status(key, opened, calls.rounds().at(*round).entered, peers, now));
      continue;
    }
    const OpenOperation& operation = calls.operations().at(std::get<wire::OpKey>(key));
    list.push_back(call_status(key, opened, operation.entries(), peers, now));
    if (!operation.entries().empty())
      list.back().what = shortened(operation.entries().begin()->second.signature.text, kShownText);
  }
  return list;
}

std::vector<wire::LinkStatus> links_of(const LinkHealth& health, const wire::RateTable& rates,
                                       const wire::EpochRecord& record, const Ranks& ranks) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, wire::LinkStatus> links;
  const auto world = static_cast<std::uint32_t>(ranks.size());
  if (rates.links.size() == std::size_t{world} * world) {
    for (std::uint32_t from = 0; from < world; ++from) {
      for (std::uint32_t to = 0; to < world; ++to) {
        const wire::LinkRate& rate = rates.links[std::size_t{from} * world + to];
        if (from == to || rate == wire::LinkRate{}) continue;
        const auto condition =
            rate.unreachable ? wire::LinkCondition::unreachable : wire::LinkCondition::ok;
        links[{from, to}] = {from, to, rate, condition, {}};
      }
    }
  }
  for (auto& [pair, finding] : health.all(relayed_pairs(record), kShownLinks)) {
    const auto from = ranks.find(pair.first);
    const auto to = ranks.find(pair.second);
    if (from == ranks.end() || to == ranks.end()) continue;
    wire::LinkStatus& link = links[{from->second, to->second}];
    link.from = from->second;
    link.to = to->second;
    link.condition = finding.condition;
    link.reason = shortened(finding.reason, kShownText);
  }
  std::vector<wire::LinkStatus> list;
  for (auto& [pair, link] : links) list.push_back(std::move(link));
  return list;
}

}  // namespace

std::vector<wire::EventStatus> EventLog::status(Instant now) const {
  std::vector<wire::EventStatus> list;
  for (const auto& [at, line] : lines_) {
    list.push_back({ms(now - at), line.warning, line.group.has_value(), line.group.value_or(0),
                    line.epoch, line.text});
  }
  return list;
}

wire::GroupStatus Group::status(Instant now) const {
  wire::GroupStatus status;
  status.group = id_;
  status.epoch = record_.epoch;
  status.epoch_ms = record_.epoch == 0 ? 0 : ms(now - decisions_.epoch_began());
  status.cause = record_.cause;
  status.min_peers = context_.min_peers();
  // Newcomers of a group that has started want no number of peers.
  for (const Peer& peer : peers_.members.empty() ? peers_.candidates : peers_.members)
    status.min_peers = std::max(status.min_peers, peer.member.min_peers);
  status.missing = peers_.members.empty() ? newcomers_.missing() : 0;
  // Peers::shown of each would take the square of their number.
  std::map<std::string, std::size_t> same;
  for (const std::vector<Peer>* list : {&peers_.members, &peers_.candidates}) {
    for (const Peer& peer : *list) ++same[peer.member.name];
  }
  const auto shown = [&](const wire::Member& member) {
    return wire::shown_name(member.name, member.id, same[member.name] == 1);
  };
  Ranks ranks;
  for (std::uint32_t rank = 0; rank < peers_.members.size(); ++rank) {
    const Peer& peer = peers_.members[rank];
    ranks[peer.member.id] = rank;
    wire::MemberStatus member;
    member.name = shown(peer.member);
    member.id = peer.member.id;
    member.address = address_of(peer.member);
    member.software = peer.software;
    member.replica = shortened(peer.member.replica, kShownText);
    member.host = rank < record_.plan.hosts.size() ? record_.plan.hosts[rank] : rank;
    member.member_ms = ms(now - peer.since);
    member.heard_ms = ms(now - peer.heard);
    member.connected = peer.connection != 0;
    member.draining = peer.draining;
    member.behind = log_.last() - std::min(peer.applied, log_.last());
    for (const auto& [call, since] : peer.waits_since) {
      if (member.waits.size() >= kShownWaits) break;
      member.waits.push_back({wire::describe(call), ms(now - since)});
    }
    member.totals = peer.totals;
    member.recent = peer.recent;
    member.recent_ms = ms(peer.recent_time);
    status.members.push_back(std::move(member));
  }
  for (const Peer& peer : peers_.candidates) {
    wire::NewcomerStatus newcomer;
    newcomer.name = shown(peer.member);
    newcomer.id = peer.member.id;
    newcomer.address = address_of(peer.member);
    newcomer.joined_ms = ms(now - peer.since);
    newcomer.state = !peer.waiting                ? wire::NewcomerState::joined
                     : peers_.members.empty()     ? wire::NewcomerState::asks
                     : newcomers_.connected(peer) ? wire::NewcomerState::ready
                                                  : wire::NewcomerState::connects;
    for (const PeerId& id : peer.unreachable) {
      if (newcomer.without.size() >= kShownNames) break;
      newcomer.without.push_back(peers_.shown(id));
    }
    status.newcomers.push_back(std::move(newcomer));
  }
  status.calls = calls_of(calls_, peers_, now);
  status.links = links_of(links_, planning_.rates(), record_, ranks);
  status.plan = {planning_.why(), record_.plan.segment_bytes, record_.plan.classes};
  for (wire::SizeClass& size : status.plan.classes) size.shares.clear();
  status.operations = operations_;
  status.aborted = log_.aborted();
  return status;
}

wire::RunStatus Operators::status(Instant now) const {
  wire::RunStatus status;
  status.software = kSoftware;
  status.run = run_.id;
  status.term = run_.term;
  // With several masters: how many have served the run, one after the other.
  for (const auto& [id, quorum] : served_.quorums())
    status.term = std::max(status.term, quorum.term() / options_.place.masters);
  status.master_ms = outbox_.began() == Instant{} ? 0 : ms(now - outbox_.began());
  status.encrypted = options_.encrypted;
  status.relays = options_.relays;
  status.admission_paused = run_.admission_paused;
  status.events = outbox_.events().status(now);
  std::size_t bytes = 0;
  for (const auto& [id, group] : served_.all()) {
    if (id < kFirstPair) status.evictions += group->evictions();
    if (group->empty() && group->record().epoch == 0) continue;
    if (bytes > kMaxStatusBytes) {
      ++status.left_out;
      continue;
    }
    status.groups.push_back(group->status(now));
    bytes += wire::encoded_bytes(status.groups.back());
  }
  return status;
}

void Operators::on_question(ConnectionId id, ControlPeer& connection, Instant now) {
  // An answer is far longer than a question.
  if (++connection.inquiries > kMaxInquiries || !questions_.take(kStatusQuestions, now))
    return connections_.refuse(id, Code::refused,
                               "too many questions about the status; ask again later");
  connection.since = now;
  const wire::Bytes bytes = wire::encoded(status(now));
  for (std::size_t at = 0; at < bytes.size(); at += wire::kPartBytes) {
    const std::size_t end = std::min(bytes.size(), at + wire::kPartBytes);
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    served_.send(id, 0,
                 wire::StatusPart{{begin, bytes.begin() + static_cast<std::ptrdiff_t>(end)},
                                  end == bytes.size()});
  }
}

}  // namespace pccl::master
