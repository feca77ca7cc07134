// LinkTable: the links, their phases, and the dials that establish them.
#include "pccl/link/links.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/wire/address.h"

namespace pccl::link {
namespace {

constexpr std::array<LinkTransition, 8> kTransitions = {{
    {LinkPhase::ended, LinkPhase::connecting, "it is needed"},
    {LinkPhase::connecting, LinkPhase::up, "its first handshake is over"},
    {LinkPhase::up, LinkPhase::connecting, "its last stripe is gone"},
    {LinkPhase::up, LinkPhase::lingering, "it is not needed any more"},
    {LinkPhase::lingering, LinkPhase::up, "it is needed again"},
    {LinkPhase::lingering, LinkPhase::ended, "its last stripe is gone, or its time is over"},
    {LinkPhase::connecting, LinkPhase::ended, "it is not needed any more"},
    {LinkPhase::ended, LinkPhase::lingering, "the other end brought it about"},
}};
constexpr std::size_t kNewLink = 0;  // the transition of a new link

// Between dials to the addresses of one peer.
constexpr Duration kDialStagger = std::chrono::milliseconds(200);
// The older peer of a pair dials, too, if the newer one has not connected by then.
constexpr Duration kOfferAfter = std::chrono::milliseconds(500);
// Between dials of a pipe, and after a new epoch, whose plan may need no links on this host.
constexpr Duration kPipeDialPause = std::chrono::seconds(1);
// Between requests for a relay.
constexpr Duration kRelayPause = std::chrono::seconds(1);
// After kRelayTries requests without success, a link waits this long for each link that needs a
// relay. So all links together ask no more often than the master answers (master::Limits::wants).
constexpr Duration kRelayTurn = std::chrono::milliseconds(150);
constexpr unsigned kRelayTries = 3;
constexpr std::size_t kMaxRelayDials = 256;
constexpr std::size_t kMaxQuestions = 8;

}  // namespace

const char* name(LinkPhase phase) {
  switch (phase) {
    case LinkPhase::connecting:
      return "connecting";
    case LinkPhase::up:
      return "up";
    case LinkPhase::lingering:
      return "lingering";
    case LinkPhase::ended:
      return "ended";
  }
  return "?";
}

std::span<const LinkTransition> link_transitions() { return kTransitions; }

void LinkTable::move(Link& link, LinkPhase to) {
  static_assert(kTransitions.size() == std::tuple_size_v<decltype(taken_)>);
  for (std::size_t i = 0; i < kTransitions.size(); ++i) {
    if (kTransitions[i].from != link.phase || kTransitions[i].to != to) continue;
    ++taken_[i];
    link.phase = to;
    return;
  }
  assert(false && "an illegal change of a link's phase");
  link.phase = to;
}

void LinkTable::log(LogLevel level, std::string text) {
  events_.emplace_back(LinkNotice{level, std::move(text)});
}

// `address`: empty if the other end dialled.
void LinkTable::note_failure(Link& link, const wire::Address& address, const std::string& reason) {
  link.dialling.failure =
      address.host.empty() ? reason : failure_at(wire::to_string(address), reason);
}

// -- which links are needed

void LinkTable::want(const std::map<PeerId, LinkTarget>& targets, const std::set<PeerId>& members,
                     const LinkContext& context) {
  at_ = context;
  for (auto it = links_.begin(); it != links_.end();) {
    Link& link = it->second;
    const bool member = members.contains(it->first);
    const bool was_member = std::exchange(link.member, member);
    if (targets.contains(it->first)) {
      ++it;
    } else if (link.is_up() && (member || !was_member)) {
      // The next plan may need the link again, and the other end may have that plan already.
      if (link.phase == LinkPhase::up) {
        move(link, LinkPhase::lingering);
        link.unwanted_since = at_.now;
      }
      link.planned = false;
      ++it;
    } else {
      take_down(link, "not needed any more", false);
      if (link.phase == LinkPhase::connecting) move(link, LinkPhase::ended);
      it = links_.erase(it);
    }
  }
  for (const auto& [peer, target] : targets) {
    const auto [it, fresh] = links_.try_emplace(peer);
    Link& link = it->second;
    link.peer = target.peer;
    link.planned = target.planned;
    link.relay.allowed = target.may_relay;
    if (fresh) {
      ++taken_[kNewLink];
      link.member = members.contains(peer);
      link.down_since = link.dialling.next = at_.now;
    } else if (link.phase == LinkPhase::lingering) {
      move(link, LinkPhase::up);
    } else if (link.phase == LinkPhase::ended) {
      move(link, LinkPhase::connecting);
    }
  }
  // Hellos that arrived before the epoch that names their sender.
  std::vector<std::uint64_t> parked;
  for (const auto& [id, entry] : stripes_)
    if (entry.phase == StripePhase::parked && links_.contains(entry.hello.from))
      parked.push_back(id);
  for (const std::uint64_t id : parked) {
    const auto it = stripes_.find(id);
    if (it != stripes_.end()) accept(it->second);
  }
}

void LinkTable::begin_epoch(const LinkContext& context) {
  at_ = context;
  for (auto& [peer, link] : links_) {
    link.told.reset();
    link.next_pipe_dial = at_.now + kPipeDialPause;
    if (!link.is_up()) link.down_since = at_.now;
  }
}

void LinkTable::forget_failures() {
  for (auto& [peer, link] : links_) link.failed = false;
}

void LinkTable::excuse_silence(Instant now) {
  for (auto& [peer, link] : links_) link.heard = now;
  for (auto& [id, entry] : stripes_) {
    entry.heard = now;
    entry.held_since.reset();
  }
}

void LinkTable::close_all(const LinkContext& context) {
  at_ = context;
  while (!stripes_.empty()) close(stripes_.begin()->first);
  links_.clear();
  dials_.clear();
}

// Ends all stripes of the link. Frames in flight on it are lost.
void LinkTable::take_down(Link& link, const std::string& reason, bool report) {
  const bool was_up = link.is_up();
  if (was_up) {
    move(link, link.phase == LinkPhase::up ? LinkPhase::connecting : LinkPhase::ended);
    LinkDown down{link.peer.id, {}};
    link.standby.add_unsent(down.unsent);
    for (const std::uint64_t id : link.stripes) stripes_.at(id).stripe->add_unsent(down.unsent);
    events_.emplace_back(std::move(down));
  }
  const std::vector<std::uint64_t> stripes = std::exchange(link.stripes, {});
  for (const std::uint64_t id : stripes) close(id);
  // Dials in progress belong to the old generation. on_dialled closes their connections.
  std::erase_if(dials_, [&](const auto& item) {
    return item.second.question == 0 && item.second.peer == link.peer.id;
  });
  std::vector<std::uint64_t> half_open;
  for (const auto& [id, entry] : stripes_)
    if (entry.phase == StripePhase::said_hello && entry.peer == link.peer.id)
      half_open.push_back(id);
  for (const std::uint64_t id : half_open) close(id);
  link.ended_generation = std::max(link.ended_generation, link.generation);
  link.standby = {};
  link.keeps = link.relay.used = false;
  link.pipe = Pipe::none;
  link.dialling.open = link.spares.open = link.spares.asked = 0;
  link.dialling.renews = false;
  link.dialling.next = at_.now;
  link.dialling.failure = reason;
  link.spares.pause = {};
  link.ping_due = false;
  link.pinged.reset();
  link.down_since = at_.now;
  link.told.reset();
  if (!was_up || !report) return;
  if (at_.member) link.broke_under = at_.abort_floor;
  events_.emplace_back(LinkStateReport{link.peer.id, wire::LinkState::broken, reason});
}

// -- dials

std::uint32_t& LinkTable::open_dials(Link& link, std::uint32_t number) {
  return number == 0 ? link.dialling.open : link.spares.open;
}

// Dials of one generation try the addresses in parallel. After a failed handshake a new generation
// begins, since the other end may have ended the old one.
void LinkTable::begin_generation(Link& link) {
  const bool renews = std::exchange(link.dialling.renews, false);
  if (link.dialling.open == 0 || renews) link.generation = next_generation_++;
}

void LinkTable::dial(Link& link, const wire::Address& address, std::uint32_t number, bool offer) {
  const std::uint64_t token = next_token_++;
  dials_[token] = {link.peer.id, address, number, Way::network, link.generation, offer, false, 0};
  ++open_dials(link, number);
  actions_.dials.push_back({token, address, {}, link.peer.id});
}

Instant LinkTable::dial_time(const Link& link, const LinkContext& context) {
  const std::uint64_t joined = context.joined;
  if (link.phase != LinkPhase::connecting || joined == link.peer.joined || joined == 0)
    return Instant::max();
  const bool waits = joined < link.peer.joined && !link.dialling.offered;
  return waits ? std::max(link.dialling.next, link.down_since + kOfferAfter) : link.dialling.next;
}

// The newer peer of a pair dials one address after the other until one answers. If it cannot
// connect, the older one dials as well, and the newer one sends its hello on that connection. So
// the newer peer numbers generations and stripes in both cases.
void LinkTable::dial_due() {
  for (auto& [peer, link] : links_) {
    const bool offers = at_.joined < link.peer.joined;
    const std::vector<wire::Address>& addresses = link.peer.addresses;
    while (at_.now >= dial_time(link, at_) && link.dialling.open < addresses.size()) {
      if (offers) {
        link.dialling.renews = false;
      } else {
        begin_generation(link);
      }
      dial(link, addresses[link.dialling.next_address++ % addresses.size()], 0, offers);
      link.dialling.next = at_.now + kDialStagger;
    }
    if (!link.is_up() && at_.now >= relay_time(link, at_)) ask_for_relay(link);
  }
}

void LinkTable::on_time(const LinkContext& context) {
  at_ = context;
  dial_due();
}

Instant LinkTable::next_deadline(const LinkContext& context) const {
  Instant next = Instant::max();
  for (const auto& [peer, link] : links_) {
    if (link.dialling.open < link.peer.addresses.size())
      next = std::min(next, dial_time(link, context));
    if (!link.is_up()) next = std::min(next, relay_time(link, context));
  }
  return next;
}

// A planned link gets a pipe beside its first stripe. The caller dials no pipes while all members
// are on one host: links carry almost nothing then.
bool LinkTable::may_dial_pipe(const Link& link) const {
  return link.is_up() && link.planned && link.pipe == Pipe::none && at_.joined > link.peer.joined &&
         at_.now >= link.next_pipe_dial;
}

void LinkTable::dial_pipe(Link& link) {
  link.pipe = Pipe::dialling;
  link.next_pipe_dial = at_.now + kPipeDialPause;
  const std::uint64_t token = next_token_++;
  const std::uint32_t number = link.spares.next_number++;
  dials_[token] = {link.peer.id, {}, number, Way::memory, link.generation, false, false, 0};
  actions_.dials.push_back({token, {}, link.peer.id, link.peer.id});
}

void LinkTable::on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Way way,
                           const LinkContext& context) {
  at_ = context;
  const auto it = dials_.find(token);
  if (it == dials_.end()) {
    actions_.close.push_back(stripe);
    return;
  }
  const Dial dial = it->second;
  dials_.erase(it);
  if (dial.question != 0) {
    events_.emplace_back(AddressTried{dial.question, true, {}});
    actions_.close.push_back(stripe);
    return;
  }
  if (dial.accepts) {
    on_accepted(stripe, local, {}, context);
    const auto accepted = stripes_.find(stripe);
    if (accepted == stripes_.end()) return;
    accepted->second.only = dial.peer;
    accepted->second.way = Way::relay;
    return;
  }
  const auto found = links_.find(dial.peer);
  const bool useful =
      found != links_.end() &&
      (dial.number == 0 ? !found->second.is_up()
                        : found->second.is_up() && found->second.generation == dial.generation &&
                              (dial.offer || !found->second.standby.has_ended(dial.number)));
  if (!useful) {
    if (found != links_.end() && dial.way != Way::memory) {
      std::uint32_t& open = open_dials(found->second, dial.number);
      if (open > 0) --open;
    }
    actions_.close.push_back(stripe);
    return;
  }
  Link& link = found->second;
  Entry& entry = add(stripe, local, way == Way::memory ? way : dial.way);
  entry.address = dial.address;
  // A pipe needs no deadline: a late answer costs nothing, and pipes of a lost neighbour end.
  if (way == Way::memory) entry.deadline = Instant::max();
  if (dial.offer) {
    entry.offered_number = dial.number;
    return offer(entry, link);
  }
  // A first handshake belongs to the newest generation at its beginning.
  if (dial.number == 0 && std::exchange(link.dialling.renews, false))
    link.generation = next_generation_++;
  say_hello(entry, link, dial.number, dial.number == 0 ? link.generation : dial.generation);
}

void LinkTable::on_dial_failed(std::uint64_t token, const std::string& reason,
                               const LinkContext& context) {
  at_ = context;
  const auto it = dials_.find(token);
  if (it == dials_.end()) return;
  const Dial dial = it->second;
  dials_.erase(it);
  if (dial.question != 0) {
    events_.emplace_back(AddressTried{dial.question, false, reason});
    return;
  }
  const auto found = links_.find(dial.peer);
  if (found == links_.end()) return;
  Link& link = found->second;
  if (dial.way == Way::memory) {
    if (link.pipe == Pipe::dialling) link.pipe = Pipe::none;
    return;
  }
  if (dial.accepts) return;  // the other end requests another one
  const bool relayed = dial.way == Way::relay;
  note_failure(link, dial.address, relayed ? "through the master: " + reason : reason);
  std::uint32_t& open = open_dials(link, dial.number);
  if (open > 0) --open;
  if (dial.number != 0) pause_spares(link);
}

void LinkTable::try_address(std::uint64_t question, const wire::Address& address) {
  const auto open = std::count_if(dials_.begin(), dials_.end(),
                                  [](const auto& item) { return item.second.question != 0; });
  if (static_cast<std::size_t>(open) >= kMaxQuestions) {
    events_.emplace_back(AddressTried{question, false, "too many questions"});
    return;
  }
  const std::uint64_t token = next_token_++;
  dials_[token].question = question;
  actions_.dials.push_back({token, address, {}, {}});
}

// -- connections through the master

// The newer peer, which sends the hello, requests them.
Instant LinkTable::relay_time(const Link& link, const LinkContext& context) {
  const bool asks = link.relay.allowed && link.is_wanted() && context.joined > link.peer.joined &&
                    context.may_report;
  return asks ? link.relay.next : Instant::max();
}

void LinkTable::ask_for_relay(Link& link) {
  const std::size_t coming = link.stripes.size() + link.spares.open;
  const std::size_t wanted = link.is_up() ? stripes_wanted(link) : coming + 1;
  if (coming >= wanted) return;
  link.relay.next = at_.now + (++link.relay.tries > kRelayTries ? relay_pause() : kRelayPause);
  events_.emplace_back(RelayWanted{link.peer.id, static_cast<std::uint32_t>(wanted - coming)});
}

Duration LinkTable::relay_pause() const {
  const auto waiting = std::count_if(links_.begin(), links_.end(), [&](const auto& item) {
    const Link& link = item.second;
    return relay_time(link, at_) != Instant::max() &&
           (!link.is_up() || (link.relay.used && link.stripes.size() < link.window.tuner.wanted()));
  });
  return std::max(kRelayPause, kRelayTurn * waiting);
}

// The master offers the connection to both ends. Dials to addresses go on; the first handshake to
// complete counts.
void LinkTable::on_relay(const PeerId& peer, const PeerId& relay, const LinkContext& context) {
  at_ = context;
  const auto it = links_.find(peer);
  if (it == links_.end() || dials_.size() >= kMaxRelayDials) return;
  Link& link = it->second;
  const bool accepts = at_.joined < link.peer.joined;
  std::uint32_t number = 0;
  if (!accepts) {
    const std::size_t coming = link.stripes.size() + link.spares.open;
    const bool has_enough =
        link.is_up() && (!link.relay.used || !link.keeps || coming >= stripes_wanted(link));
    if (!link.is_wanted() || has_enough) return;
    if (link.is_up()) {
      number = link.spares.next_number++;
    } else {
      begin_generation(link);
    }
    ++open_dials(link, number);
  }
  const std::uint64_t token = next_token_++;
  dials_[token] = {peer, {}, number, Way::relay, link.generation, false, accepts, 0};
  actions_.dials.push_back({token, {}, {}, peer, relay, accepts});
}

// -- state

bool LinkTable::is_up(const PeerId& peer) const {
  const auto it = links_.find(peer);
  return it != links_.end() && it->second.is_up();
}

bool LinkTable::is_checked(const PeerId& peer) const {
  const auto it = links_.find(peer);
  return it != links_.end() && it->second.checked;
}

bool LinkTable::has_failed(const PeerId& peer) const {
  const auto it = links_.find(peer);
  return it != links_.end() && it->second.failed && !it->second.is_up();
}

bool LinkTable::never_worked(const PeerId& peer, const LinkContext& context) const {
  const auto it = links_.find(peer);
  if (it == links_.end()) return false;
  const Link& link = it->second;
  return !link.is_up() && link.ended_generation == 0 && !link.planned &&
         context.joined > link.peer.joined;
}

std::vector<LinkStateReport> LinkTable::report_all(const LinkContext& context) const {
  std::vector<LinkStateReport> reports;
  for (const auto& [peer, link] : links_) {
    if (!link.planned) continue;
    const std::string& why = link.dialling.failure;
    // A link that broke may be up again, but the bytes that were in flight are lost.
    if (link.broke_under == context.abort_floor)
      reports.push_back({peer, wire::LinkState::broken, why});
    if (link.told)
      reports.push_back(
          {peer, link.is_up() ? wire::LinkState::silent : wire::LinkState::unreachable, why});
    if (link.is_up() && !link.told)
      reports.push_back(
          {peer, link.relay.used ? wire::LinkState::relayed : wire::LinkState::mended, "it works"});
  }
  return reports;
}

Stripe* LinkTable::stripe(std::uint64_t id) {
  const auto it = stripes_.find(id);
  return it == stripes_.end() ? nullptr : it->second.stripe.get();
}

const PeerId* LinkTable::peer_of(std::uint64_t id) const {
  const auto it = stripes_.find(id);
  const bool known = it != stripes_.end() && it->second.phase == StripePhase::established;
  return known ? &it->second.peer : nullptr;
}

std::vector<std::uint64_t> LinkTable::held_stripes() const {
  std::vector<std::uint64_t> held;
  for (const auto& [id, entry] : stripes_)
    if (entry.stripe->held()) held.push_back(id);
  return held;
}

bool LinkTable::is_among_first(std::uint64_t id, std::size_t count, std::size_t spare) const {
  const PeerId* const peer = peer_of(id);
  const auto it = peer == nullptr ? links_.end() : links_.find(*peer);
  if (it == links_.end()) return false;
  const std::vector<std::uint64_t>& stripes = it->second.stripes;
  const std::size_t most = stripes.size() > spare ? stripes.size() - spare : stripes.size();
  const auto end = stripes.begin() + static_cast<std::ptrdiff_t>(std::min(count, most));
  return std::find(stripes.begin(), end, id) != end;
}

// -- memory of operations

void LinkTable::wake(const PeerId& peer) {
  const auto it = links_.find(peer);
  if (it == links_.end() || !it->second.is_up()) return;
  flush_.insert(it->second.stripes.begin(), it->second.stripes.end());
}

std::uint64_t LinkTable::release(const PeerId& peer, std::uint64_t token) {
  const auto it = links_.find(peer);
  if (it == links_.end()) return 0;
  std::uint64_t dropped = it->second.standby.release(token);
  for (const std::uint64_t id : it->second.stripes)
    dropped += stripes_.at(id).stripe->release(token);
  return dropped;
}

std::uint64_t LinkTable::unsent(const PeerId& peer, std::uint64_t token) const {
  const auto it = links_.find(peer);
  if (it == links_.end()) return 0;
  std::uint64_t bytes = it->second.standby.unsent(token);
  for (const std::uint64_t id : it->second.stripes) bytes += stripes_.at(id).stripe->unsent(token);
  return bytes;
}

LinkActions LinkTable::take_actions() {
  closed_.clear();
  LinkActions actions = std::exchange(actions_, {});
  actions.flush.assign(flush_.begin(), flush_.end());
  flush_.clear();
  return actions;
}

}  // namespace pccl::link
