// The engine's links to other peers: which are needed, how they come about, their stripes, which
// stand in for each other, and what moves through them.
#include <algorithm>
#include <utility>

#include "pccl/base/text.h"
#include "pccl/peer/engine.h"
#include "pccl/topology/plan.h"
#include "pccl/topology/rates.h"
#include "pccl/wire/address.h"

namespace pccl::peer {
namespace {

constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
constexpr Duration kDialStagger =
    std::chrono::milliseconds(200);  // between the addresses of one peer
// The older peer of a pair dials, too, if the newer one has not got through by then.
constexpr Duration kOfferAfter = std::chrono::milliseconds(500);
// So long after a link's end there may be hellos under way that were meant for it.
constexpr Duration kLateHello = std::chrono::seconds(1);
constexpr std::size_t kMaxParked = 64;
constexpr std::size_t kMaxTries = 8;
// Connections that were accepted and have not said who they are. (Which of them go when there are
// too many, the shell knows: io/anteroom.h. Here are also offers and pipes.)
constexpr std::size_t kMaxHandshakes = 2048;
// After one that came to nothing, and after a new epoch: often the next plan has all of them in
// memory.
constexpr Duration kMemoryDialPause = std::chrono::seconds(1);
// After spares that failed: twice as long each time.
constexpr Duration kSpareDialPause = std::chrono::milliseconds(500);
constexpr Duration kMostSpareDialPause = std::chrono::seconds(30);
constexpr Duration kTuneWindow = std::chrono::seconds(1);
constexpr Duration kPingEvery = std::chrono::seconds(5);  // of planned links at rest
constexpr std::size_t kMaxStripes = 256;                  // of one link, whoever dials
constexpr std::size_t kKnownEnded = 1024;  // stripes of one link; older ones have all ended
constexpr std::size_t kMaxWords = 4096;    // that wait to be said
constexpr std::size_t kMaxLimbo = 1024;  // stripes of one link of which the other end says nothing
constexpr std::size_t kMaxUnconfirmed = 65536;  // frames of one stripe
// Of links through the master:
constexpr unsigned kRelayStripes = 2;
constexpr Duration kRelayPause = std::chrono::seconds(1);  // until they are asked for again
// A link that has asked a few times in vain waits so long for each one that needs a relay: all of
// them ask no more often than the master answers (master::Options::wants), and each has its turn.
constexpr Duration kRelayTurn = std::chrono::milliseconds(150);
constexpr unsigned kRelayTries = 3;
constexpr std::size_t kMaxRelayDials = 256;

// What is said of stripes is checked: a number spoilt under way would stand for another one.
wire::Bytes sealed(link::FrameHeader& header, wire::Bytes payload) {
  const iovec whole{payload.data(), payload.size()};
  header.payload_bytes = static_cast<std::uint32_t>(payload.size());
  header.checksum = link::checksum(header, {&whole, 1});
  return payload;
}

// `address`: none if the other end dialled.
std::string failure_at(const wire::Address& address, const std::string& reason) {
  if (address.host.empty()) return reason;
  return pccl::failure_at(wire::to_string(address), reason);
}

void push_greeting(link::Stripe& stripe, link::FrameType type, const link::Hello& hello) {
  wire::Bytes payload;
  wire::Writer writer(payload);
  writer(hello);
  link::FrameHeader header;
  header.type = type;
  payload = sealed(header, std::move(payload));
  stripe.push(link::make_frame(header, std::move(payload)));
}

}  // namespace

// ---- links
// --------------------------------------------------------------------------------------------------------

// Which peers we need a link to: those of the plan; for a newcomer all members; and newcomers that
// may dial us.
void Engine::choose_links() {
  std::map<PeerId, wire::Member> wanted;
  std::set<PeerId> for_state;  // of these: not in the plan
  std::set<PeerId> relayed;
  if (const Record& world = record()) {
    std::size_t rank = 0;
    while (rank < world->members.size() && world->members[rank].id != id()) ++rank;
    for (const auto& [a, b] : topology::edges(world->plan)) {
      if (a != rank && b != rank) continue;
      const wire::Member& other = world->members[a == rank ? b : a];
      wanted[other.id] = other;
    }
    for (const auto& [a, b] : world->relayed) {
      if (a != rank && b != rank) continue;
      const PeerId& other = world->members[a == rank ? b : a].id;
      const std::vector<PeerId>& partners = transfer_.partners();
      // To measure ways that nothing uses would be no use.
      if (wanted.contains(other) ||
          std::find(partners.begin(), partners.end(), other) != partners.end())
        relayed.insert(other);
    }
    for (const wire::Member& newcomer : expected_) wanted.try_emplace(newcomer.id, newcomer);
    for (const wire::Member& member : world->members) {
      const std::vector<PeerId>& partners = transfer_.partners();
      const bool partner = std::find(partners.begin(), partners.end(), member.id) != partners.end();
      if ((partner || (optimizing_ && optimizing_->probed.contains(member.id))) &&
          wanted.try_emplace(member.id, member).second) {
        for_state.insert(member.id);
      }
    }
  } else if (prepare_) {
    for (const wire::Member& member : prepare_->members) wanted[member.id] = member;
  }
  const auto is_member = [&](const PeerId& peer) {
    return record() && std::any_of(record()->members.begin(), record()->members.end(),
                                   [&](const auto& member) { return member.id == peer; });
  };
  for (auto it = links_.begin(); it != links_.end();) {
    Link& link = it->second;
    const bool member = is_member(it->first);
    const bool was_member = std::exchange(link.member, member);
    if (wanted.contains(it->first)) {
      ++it;
    } else if (link.up && (member || !was_member)) {
      // The next plan may need it again, and have come to the other end already.
      if (std::exchange(link.wanted, false)) link.unwanted_since = now_;
      link.planned = false;
      ++it;
    } else {
      link_down(link, "not needed any more", false);
      it = links_.erase(it);
    }
  }
  for (const auto& [peer, member] : wanted) {
    const auto [it, fresh] = links_.try_emplace(peer);
    it->second.peer = member;
    it->second.wanted = true;
    it->second.planned = !for_state.contains(peer);
    it->second.may_relay = relayed.contains(peer);
    if (fresh) {
      it->second.member = is_member(peer);
      it->second.down_since = now_;
      it->second.next_dial = now_;
    }
  }
  // Hellos that came before the epoch that names their sender.
  std::vector<std::uint64_t> parked;
  for (const auto& [stripe, state] : stripes_) {
    if (state.parked && links_.contains(state.hello.from)) parked.push_back(stripe);
  }
  for (const std::uint64_t stripe : parked) {
    const auto it = stripes_.find(stripe);
    if (it == stripes_.end()) continue;
    it->second.parked = false;
    if (it->second.offer) {
      accept_offer(it->second);
    } else {
      accept_hello(it->second);
    }
  }
  check_prepared();
  choose_neighbours();
  dial_memory(now_);
}

void Engine::choose_neighbours() {
  std::vector<wire::Member> near;
  if (const Record& world = record()) {
    near = world->members;
    near.insert(near.end(), expected_.begin(), expected_.end());
  } else if (prepare_) {
    near = prepare_->members;
  }
  locality_.choose(near, joined_, now_);
}

void Engine::on_prepare(const wire::Prepare& prepare) {
  if (out_ || session_.member() || !asked_) return;  // or it gave up waiting meanwhile
  prepare_ = prepare;
  renew_links();
  for (auto& [peer, link] : links_) link.in_vain = false;
  choose_links();
}

void Engine::on_expect(const wire::Expect& expect) {
  if (out_) return;
  expected_ = expect.newcomers;
  newcomers_ready_ = expect.ready;
  choose_links();
}

void Engine::check_prepared() {
  if (session_.member() || !prepare_) return;
  std::vector<PeerId> without;
  for (const wire::Member& member : prepare_->members) {
    const auto it = links_.find(member.id);
    if (it == links_.end()) return;
    if (it->second.up) continue;
    if (!it->second.in_vain) return;
    without.push_back(member.id);
  }
  // With some missing it is said again and again, as they are: the master may have waited for
  // another word of theirs.
  if (prepared_epoch_ == prepare_->epoch && without.empty() && prepared_without_.empty()) return;
  prepared_epoch_ = prepare_->epoch;
  prepared_without_ = without;
  session_.prepared(prepare_->epoch, without);
}

void Engine::dial(Link& link, const wire::Address& address, std::uint32_t stripe, bool offer) {
  const std::uint64_t token = next_dial_token_++;
  dials_[token] = {link.peer.id, address, stripe, false, link.generation, offer};
  std::uint32_t& open = stripe == 0 ? link.dials_open : link.spares_open;
  ++open;
  actions_.dials.push_back({token, address, {}, link.peer.id});
}

// When it may be dialled next.
Instant Engine::dial_time(const Link& link) const {
  if (link.up || !link.wanted || joined_ == link.peer.joined || joined_ == 0) return Instant::max();
  const bool waits = joined_ < link.peer.joined && !link.offered;
  return waits ? std::max(link.next_dial, link.down_since + kOfferAfter) : link.next_dial;
}

// When it may be asked for next, by the one that says hello.
Instant Engine::relay_time(const Link& link) const {
  const bool asks =
      link.may_relay && link.wanted && joined_ > link.peer.joined && session_.welcomed();
  return asks ? link.next_relay : Instant::max();
}

void Engine::ask_for_relay(Link& link) {
  const std::size_t coming = link.stripes.size() + link.spares_open;
  const std::size_t wanted = link.up ? stripes_wanted(link) : coming + 1;
  if (coming >= wanted) return;
  link.next_relay = now_ + (++link.relay_tries > kRelayTries ? relay_pause() : kRelayPause);
  session_.want_relay(link.peer.id, static_cast<std::uint32_t>(wanted - coming));
}

Duration Engine::relay_pause() const {
  const auto waiting = std::count_if(links_.begin(), links_.end(), [&](const auto& item) {
    const Link& link = item.second;
    return relay_time(link) != Instant::max() &&
           (!link.up || (link.relayed && link.stripes.size() < link.tuner.wanted()));
  });
  return std::max(kRelayPause, kRelayTurn * waiting);
}

// A connection through the master, which the other end is told of as well. Addresses are dialled
// meanwhile: the first handshake counts.
void Engine::on_relay(const wire::Relay& relay) {
  const auto it = links_.find(relay.peer);
  if (out_ || it == links_.end() || dials_.size() >= kMaxRelayDials) return;
  Link& link = it->second;
  const std::uint64_t token = next_dial_token_++;
  const bool accepts = joined_ < link.peer.joined;
  const std::size_t coming = link.stripes.size() + link.spares_open;
  if (!accepts && (!link.wanted ||
                   (link.up && (!link.relayed || !link.keeps || coming >= stripes_wanted(link)))))
    return;
  std::uint32_t stripe = 0;
  if (!accepts && link.up) {
    stripe = link.next_stripe++;
    ++link.spares_open;
  } else if (!accepts) {
    const bool renews = std::exchange(link.renews, false);
    if (link.dials_open == 0 || renews) link.generation = next_generation_++;
    ++link.dials_open;
  }
  dials_[token] = {relay.peer, {}, stripe, false, link.generation, false, true, accepts};
  actions_.dials.push_back({token, {}, {}, relay.peer, relay.token, accepts});
}

// The newer peer of a pair dials, one address after the other until one answers. If it does not get
// through, perhaps the older one does; then the newer one says hello there. So one end, and always
// the same one, numbers generations and stripes, whoever dials.
void Engine::dial_due(Instant now) {
  for (auto& [peer, link] : links_) {
    const bool offers = joined_ < link.peer.joined;
    while (now >= dial_time(link) && link.dials_open < link.peer.addresses.size()) {
      // Addresses are tried side by side in one generation. After a handshake that came to nothing
      // the other end may have ended that one.
      const bool renews = std::exchange(link.renews, false);
      if (!offers && (link.dials_open == 0 || renews)) link.generation = next_generation_++;
      dial(link, link.peer.addresses[link.next_address++ % link.peer.addresses.size()], 0, offers);
      link.next_dial = now + kDialStagger;
    }
    if (!link.up && now >= relay_time(link)) ask_for_relay(link);
  }
}

// Links inside this host get a stripe through memory beside the one that they came about with,
// where the plan has them carry much. (Where all are on one host, next to nothing goes over links.)
void Engine::dial_memory(Instant now) {
  if (out_ || locality_.active()) return;
  for (auto& [peer, link] : links_) {
    if (!link.up || !link.planned || link.memory || link.dials_memory ||
        joined_ <= link.peer.joined || now < link.next_memory_dial || !locality_.shares_with(peer))
      continue;
    link.dials_memory = true;
    link.next_memory_dial = now + kMemoryDialPause;
    const std::uint64_t token = next_dial_token_++;
    dials_[token] = {peer, {}, link.next_stripe++, true, link.generation};
    actions_.dials.push_back({token, {}, peer, peer});
  }
}

// Somebody has asked the master who reaches it.
void Engine::on_try(const wire::Try& question) {
  if (out_ || tries_.size() >= kMaxTries)
    return session_.tried(question.number, false, "too many questions");
  const std::uint64_t token = next_dial_token_++;
  tries_[token] = question.number;
  actions_.dials.push_back({token, question.address, {}, {}});
}

void Engine::on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Instant now,
                        bool memory) {
  now_ = now;
  if (const auto tried = tries_.extract(token)) {
    session_.tried(tried.mapped(), true, {});
    actions_.close.push_back(stripe);
    return;
  }
  const auto it = dials_.find(token);
  if (it == dials_.end()) {
    actions_.close.push_back(stripe);
    return;
  }
  const Dial dial = it->second;
  dials_.erase(it);
  if (dial.accepts) {
    on_accepted(stripe, local, now);
    const auto accepted = stripes_.find(stripe);
    if (accepted == stripes_.end()) return;
    accepted->second.neighbour = dial.peer;
    accepted->second.relayed = true;
    return;
  }
  const auto link = links_.find(dial.peer);
  const bool useful =
      link != links_.end() &&
      (dial.stripe == 0 ? !link->second.up
                        : link->second.up && link->second.generation == dial.generation &&
                              (dial.offer || !has_ended(link->second, dial.stripe)));
  if (!useful) {
    if (link != links_.end() && !dial.memory) {
      std::uint32_t& open = dial.stripe == 0 ? link->second.dials_open : link->second.spares_open;
      if (open > 0) --open;
    }
    actions_.close.push_back(stripe);
    return;
  }
  StripeState& state = stripes_[stripe];
  state.stripe.reset(new link::Stripe(stripe, *this));
  state.local = local;
  state.memory = memory;
  state.relayed = dial.relayed;
  state.address = dial.address;
  // A neighbour that answers late costs nothing, and one that is gone takes its pipes with it.
  state.deadline = memory ? Instant::max() : now + kHandshakeTimeout;
  if (dial.offer) {
    state.offered_stripe = dial.stripe;
    return offer_stripe(state, link->second);
  }
  // A first handshake is of the generation that is the newest when it begins.
  if (dial.stripe == 0 && std::exchange(link->second.renews, false))
    link->second.generation = next_generation_++;
  say_hello(state, link->second, dial.stripe,
            dial.stripe == 0 ? link->second.generation : dial.generation);
}

void Engine::say_hello(StripeState& state, Link& link, std::uint32_t stripe,
                       std::uint64_t generation) {
  state.peer = link.peer.id;
  state.dialled = true;
  const unsigned fixed = options_.settings.stripes;
  const bool keeps = stripe == 0
                         ? (fixed == 0 ? !state.local && options_.stripes.most > 1 : fixed > 1)
                         : !state.memory && link.keeps;
  state.hello = {session_.run(), id(), link.peer.id, generation, stripe, keeps, state.memory};
  if (keeps) state.stripe->keep();
  push_greeting(*state.stripe, link::FrameType::hello, state.hello);
  flush_.insert(state.stripe->id());
}

// The other end is to say hello on it.
void Engine::offer_stripe(StripeState& state, const Link& link) {
  state.offered_to = link.peer.id;
  state.stripe->keep();  // until the hello says otherwise: what is kept is counted from the first
  push_greeting(*state.stripe, link::FrameType::offer,
                {session_.run(), id(), link.peer.id, 0, state.offered_stripe, false, false});
  flush_.insert(state.stripe->id());
}

// Whoever is newer says hello on it, as if it had dialled.
void Engine::accept_offer(StripeState& state) {
  const std::uint64_t id = state.stripe->id();
  const auto it = links_.find(state.hello.from);
  if (it == links_.end() || joined_ <= it->second.peer.joined) return close_stripe(id);
  Link& link = it->second;
  state.offer = true;
  if (!link.up) {
    if (!link.wanted || state.hello.stripe != 0) return close_stripe(id);
    const bool renews = std::exchange(link.renews, false);
    if (link.dials_open == 0 || renews) link.generation = next_generation_++;
    ++link.dials_open;
    return say_hello(state, link, 0, link.generation);
  }
  if (link.spares_asked == 0 || state.hello.stripe == 0 || !link.keeps) return close_stripe(id);
  --link.spares_asked;
  ++link.spares_open;
  say_hello(state, link, link.next_stripe++, link.generation);
}

void Engine::on_dial_failed(std::uint64_t token, const std::string& reason, Instant now) {
  now_ = now;
  if (const auto tried = tries_.extract(token))
    return session_.tried(tried.mapped(), false, reason);
  const auto it = dials_.find(token);
  if (it == dials_.end()) return;
  const Dial dial = it->second;
  dials_.erase(it);
  const auto link = links_.find(dial.peer);
  if (link == links_.end()) return;
  if (dial.memory) {
    link->second.dials_memory = false;
    return;
  }
  if (dial.accepts) return;  // the other end asks for another one
  link->second.last_failure =
      failure_at(dial.address, dial.relayed ? "through the master: " + reason : reason);
  if (dial.stripe == 0) {
    if (link->second.dials_open > 0) --link->second.dials_open;
    return;
  }
  if (link->second.spares_open > 0) --link->second.spares_open;
  pause_spares(link->second);
}

void Engine::on_accepted(std::uint64_t stripe, bool local, Instant now, const PeerId& neighbour) {
  now_ = now;
  std::size_t handshakes = 0;
  for (const auto& [id, state] : stripes_) handshakes += state.established || state.dialled ? 0 : 1;
  if (out_ || handshakes >= kMaxHandshakes) {
    actions_.close.push_back(stripe);
    return;
  }
  StripeState& state = stripes_[stripe];
  state.stripe.reset(new link::Stripe(stripe, *this));
  state.local = local;
  state.memory = !neighbour.empty();
  state.neighbour = neighbour;
  state.deadline = now + kHandshakeTimeout;
}

Status Engine::on_hello(StripeState& state, const link::FrameHeader& header,
                        std::span<const std::uint8_t> payload) {
  const bool offer = header.type == link::FrameType::offer;
  const bool greeting = header.type == link::FrameType::hello || offer;
  const bool refused = header.type == link::FrameType::refused && !state.offered_to.empty();
  if (state.established || (greeting == state.dialled && !refused) || state.parked ||
      (offer && (state.memory || !state.offered_to.empty()))) {
    return Status(Code::refused, "a handshake out of turn");
  }
  if (header.type == link::FrameType::refused) {
    return Status(Code::refused,
                  "refused: " + std::string(payload.begin(),
                                            payload.begin() +
                                                static_cast<std::ptrdiff_t>(
                                                    std::min<std::size_t>(payload.size(), 256))));
  }
  link::Hello hello;
  wire::Reader reader(payload);
  reader(hello);
  if (!reader.complete()) return Status(Code::refused, "a malformed handshake");
  if (!greeting) {
    if (hello.from != state.peer || hello.to != id())
      return Status(Code::refused, "another peer answered");
    establish(state);
    return {};
  }
  state.hello = hello;
  state.offer = offer;
  const bool stranger = !links_.contains(hello.from);
  if (!state.offered_to.empty() && hello.from != state.offered_to)
    return Status(Code::refused, "another peer answered");
  if (hello.to != id() || (session_.run() != 0 && hello.run != session_.run()) ||
      hello.memory != state.memory || (!state.neighbour.empty() && hello.from != state.neighbour)) {
    link::FrameHeader answer;
    answer.type = link::FrameType::refused;
    const std::string_view why = hello.to != id() ? link::kAnotherPeer : link::kAnotherRun;
    state.stripe->push(link::make_frame(answer, wire::Bytes(why.begin(), why.end())));
    flush_.insert(state.stripe->id());
    state.deadline = now_;  // close it at the next tick, when the answer is out
    state.parked = true;
    state.hello.from = {};
    return {};
  }
  if (stranger) {
    // Perhaps one of the next epoch: wait for it, within the handshake's deadline.
    std::size_t parked = 0;
    std::uint64_t oldest = 0;
    for (const auto& [id, other] : stripes_) {
      if (!other.parked) continue;
      if (parked++ == 0) oldest = id;
    }
    if (parked >= kMaxParked) close_stripe(oldest);
    state.parked = true;
    return {};
  }
  if (offer) {
    accept_offer(state);
  } else {
    accept_hello(state);
  }
  return {};
}

void Engine::accept_hello(StripeState& state) {
  const auto it = links_.find(state.hello.from);
  if (it == links_.end()) return;
  Link& link = it->second;
  const std::uint64_t id = state.stripe->id();
  const link::Hello& hello = state.hello;
  // The newer one of two says hello; another member may do so in its name, but not in the older's.
  if (link.peer.joined <= joined_) return close_stripe(id);
  // Numbers of generations that are over keep late hellos from bringing a link about in vain. After
  // a while there are none, and whoever said a far too high number does not keep the peer away.
  if (hello.stripe == 0 && !link.up && now_ - link.down_since >= kLateHello)
    link.generation = link.ended_generation = 0;
  if (hello.generation <= link.ended_generation || hello.generation < link.generation)
    return close_stripe(id);
  if (hello.stripe == 0) {
    if (hello.generation != link.generation) {
      if (link.up) link_down(link, "replaced by a new connection", link.planned);
      link.generation = hello.generation;
    }
    if (link.up) return close_stripe(id);  // by another address of ours
    link.keeps = hello.keeps;
  } else if (!link.up || hello.generation != link.generation || has_ended(link, hello.stripe) ||
             (hello.keeps != link.keeps && !hello.memory)) {
    return close_stripe(id);
  }
  for (const std::uint64_t other : link.stripes) {
    if (stripes_.at(other).hello.stripe == hello.stripe) return close_stripe(id);
  }
  if (link.stripes.size() >= kMaxStripes) return close_stripe(id);
  if (hello.keeps) {
    state.stripe->keep();
  } else {
    state.stripe->keep_nothing();
  }
  state.peer = state.hello.from;
  push_greeting(*state.stripe, link::FrameType::welcome,
                {session_.run(), this->id(), state.peer, hello.generation, hello.stripe,
                 hello.keeps, hello.memory});
  establish(state);
}

void Engine::establish(StripeState& state) {
  Link& link = links_.at(state.peer);
  end_offer(state);
  state.established = true;
  state.heard = now_;
  const std::uint64_t id = state.stripe->id();
  const std::uint32_t number = state.hello.stripe;
  if (state.dialled && number == 0 && link.up)
    return close_stripe(id);  // another address was faster
  link.stripes.push_back(id);
  flush_.insert(id);
  if (state.memory) {
    link.memory = true;
    link.dials_memory = false;
  }
  link.relay_tries = 0;
  if (number != 0) {
    if (state.dialled && !state.memory && link.spares_open > 0) --link.spares_open;
    link.spare_pause = {};
    link.next_spare = now_;
    return;
  }
  link.up = true;
  link.generation = state.hello.generation;
  link.reported = link.in_vain = false;
  link.relayed = state.relayed;
  if (link.planned && session_.member())
    session_.report_link(link.peer.id, mended(link), "it came about");
  link.heard = now_;
  link.checked =
      options_.settings.checksum == Checksum::always ||
      (options_.settings.checksum == Checksum::automatic && !state.local && !options_.encrypted);
  link.keeps = state.hello.keeps;
  link.unwanted_since = now_;
  link.next_stripe = 1;
  link.offered = state.offer || !state.offered_to.empty();
  link.spares_asked = 0;
  link.address.reset();
  // Where only the older end gets through, it dials the others as well.
  if (state.dialled != link.offered && !state.relayed) link.address = state.address;
  if (link.relayed && !std::exchange(link.told_relay, true)) {
    log(LogLevel::warn, "no connection to peer " + link.peer.id.brief() +
                            " comes about, from either end: what goes between goes through the "
                            "master");
  }
  if (state.dialled) {
    if (link.dials_open > 0) --link.dials_open;
    const unsigned fixed = options_.settings.stripes;
    link.tuner = !link.keeps    ? link::StripeTuner(1)
                 : link.relayed ? link::StripeTuner(fixed == 0 ? kRelayStripes
                                                               : std::min(fixed, kRelayStripes))
                 : fixed != 0   ? link::StripeTuner(fixed)
                                : link::StripeTuner(options_.stripes);
    link.window_since = now_;
    dial_spares(link);
  }
  check_prepared();
  transfer_.link_changed(link.peer.id, true);
  dial_memory(now_);
}

void Engine::close_stripe(std::uint64_t id) {
  const auto it = stripes_.find(id);
  if (it == stripes_.end()) return;
  end_offer(it->second);
  actions_.close.push_back(id);
  closed_.push_back(std::move(it->second));
  stripes_.erase(it);
  flush_.erase(id);
}

// An offer that we made came to its end, whichever.
void Engine::end_offer(StripeState& state) {
  if (state.offered_to.empty() || state.established) return;
  const auto it = links_.find(state.offered_to);
  if (it == links_.end()) return;
  std::uint32_t& open = state.offered_stripe == 0 ? it->second.dials_open : it->second.spares_open;
  if (open > 0) --open;
}

void Engine::link_down(Link& link, const std::string& reason, bool report) {
  const bool was_up = std::exchange(link.up, false);
  if (was_up) transfer_.link_changed(link.peer.id, false);
  const std::vector<std::uint64_t> stripes = std::exchange(link.stripes, {});
  for (const std::uint64_t id : stripes) close_stripe(id);
  // Dials under way belong to the old generation: they are closed when they come through.
  std::erase_if(dials_, [&](const auto& item) { return item.second.peer == link.peer.id; });
  for (auto it = stripes_.begin(); it != stripes_.end();) {
    const std::uint64_t id = it->first;
    const bool half_open =
        it->second.dialled && !it->second.established && it->second.peer == link.peer.id;
    ++it;
    if (half_open) close_stripe(id);
  }
  link.ended_generation = std::max(link.ended_generation, link.generation);
  link.dials_open = link.spares_open = link.spares_asked = 0;
  link.memory = link.dials_memory = link.keeps = link.relayed = false;
  link.ended.clear();
  link.all_ended_before = 0;
  link.spare_pause = {};
  link.renews = false;
  link.ping_due = false;
  link.pinged.reset();
  link.limbo.clear();
  link.words.clear();
  link.again.clear();
  link.down_since = now_;
  link.next_dial = now_;
  link.reported = false;
  link.last_failure = reason;
  if (!was_up) return;
  executor_.reset_link(link.peer.id);
  if (prepare_) prepared_epoch_ = 0;
  if (!report) return;
  if (record()) link.broke_under = record()->abort_floor;
  session_.report_link(link.peer.id, wire::LinkState::broken, reason);
}

// ---- stripes that stand in for each other

std::uint32_t Engine::stripes_wanted(const Link& link) const {
  std::uint32_t links = 0;
  for (const auto& [peer, other] : links_) links += other.up && other.keeps ? 1 : 0;
  return std::min(link.tuner.wanted(), std::max(1U, options_.stripe_budget / std::max(1U, links)));
}

bool Engine::has_ended(const Link& link, std::uint32_t stripe) {
  return stripe < link.all_ended_before || link.ended.contains(stripe);
}

// False: that is known already. (Of an old one that is up to now it is not.)
bool Engine::note_ended(Link& link, std::uint32_t stripe) {
  if (stripe >= link.all_ended_before && !link.ended.insert(stripe).second) return false;
  while (link.ended.size() > kKnownEnded && !link.limbo.contains(*link.ended.begin())) {
    link.all_ended_before = *link.ended.begin() + 1;
    link.ended.erase(link.ended.begin());
  }
  return true;
}

// Of those that were dialled together the first counts.
void Engine::pause_spares(Link& link) {
  if (now_ < link.next_spare) return;
  link.spare_pause = std::clamp(link.spare_pause * 2, kSpareDialPause, kMostSpareDialPause);
  link.next_spare = now_ + link.spare_pause;
}

// As many as it should have: those that it never had, and in the place of those that ended.
void Engine::dial_spares(Link& link) {
  if (!link.up || !link.wanted || !link.keeps || joined_ <= link.peer.joined ||
      now_ < link.next_spare)
    return;
  if (link.relayed && now_ >= relay_time(link)) return ask_for_relay(link);
  if (link.offered) return ask_for_stripes(link);
  if (!link.address) return;
  const std::uint32_t wanted = stripes_wanted(link);
  while (link.stripes.size() + link.spares_open < wanted + (link.memory ? 1U : 0U))
    dial(link, *link.address, link.next_stripe++);
}

// The same, of the end that can dial.
void Engine::ask_for_stripes(Link& link) {
  if (link.spares_asked > 0 && now_ >= link.asked_until) {
    link.spares_asked = 0;
    return pause_spares(link);
  }
  const std::size_t wanted = stripes_wanted(link) + (link.memory ? 1U : 0U);
  const std::size_t coming = link.stripes.size() + link.spares_open + link.spares_asked;
  if (coming >= wanted) return;
  link::FrameHeader header;
  header.type = link::FrameType::wanted;
  header.credit = static_cast<std::uint32_t>(wanted - coming);
  link.spares_asked += header.credit;
  link.asked_until = now_ + options_.settings.link_timeout + kHandshakeTimeout;
  link.words.push_back(link::make_frame(header));
  wake(link.peer.id);
}

Status Engine::on_wanted(const PeerId& from, std::uint32_t count) {
  const auto it = links_.find(from);
  if (it == links_.end() || !it->second.keeps || joined_ >= it->second.peer.joined ||
      count > kMaxStripes)
    return Status(Code::refused, "connections were asked for that are not due");
  Link& link = it->second;
  if (!link.up || !link.address) return {};
  const std::size_t room =
      kMaxStripes - std::min<std::size_t>(kMaxStripes, link.stripes.size() + link.spares_open);
  for (std::size_t i = 0; i < std::min<std::size_t>(count, room); ++i)
    dial(link, *link.address, 1, true);
  return {};
}

// It takes nothing with it: each end tells the other how many frames had come on it, and the rest
// goes again on the link's other stripes. If there are none, the link is down.
void Engine::lose_stripe(std::uint64_t id, const std::string& reason) {
  StripeState& state = stripes_.at(id);
  Link& link = links_.at(state.peer);
  const bool others =
      std::any_of(link.stripes.begin(), link.stripes.end(),
                  [&](std::uint64_t other) { return other != id && !stripes_.at(other).memory; });
  if (!link.keeps || state.memory || !others) return link_down(link, reason, link.planned);
  if (link.limbo.size() >= kMaxLimbo)
    return link_down(link, "too many lost connections", link.planned);
  const std::uint32_t number = state.hello.stripe;
  const std::uint64_t received = state.stripe->frames_received();
  link::LeftFrames left = state.stripe->end();
  // What was said on it of others has to be said again at once: both ends may be waiting for just
  // that. (What is said twice is ignored. Their places remain, for the others' numbers.)
  for (link::OutgoingFrame& frame : left.frames)
    if (link::type_of(frame) == link::FrameType::lost) link.words.push_back(std::move(frame));
  ++stand_ins_;
  std::erase(link.stripes, id);
  close_stripe(id);
  link.limbo[number] = {std::move(left), now_};
  (void)note_ended(link, number);
  say_lost(link, number, received);
  // Another one is dialled at the next tick (tune_stripes): maybe this is the end of all of them.
}

void Engine::say_lost(Link& link, std::uint32_t stripe, std::uint64_t received) {
  wire::Bytes payload;
  wire::Writer writer(payload);
  writer(link::Lost{link.generation, stripe, received});
  link::FrameHeader header;
  header.type = link::FrameType::lost;
  payload = sealed(header, std::move(payload));
  link.words.push_back(link::make_frame(header, std::move(payload)));
  wake(link.peer.id);
}

Status Engine::on_lost(const PeerId& from, std::span<const std::uint8_t> payload) {
  link::Lost lost;
  wire::Reader reader(payload);
  reader(lost);
  const auto found = links_.find(from);
  if (!reader.complete()) return Status(Code::refused, "a malformed word of a lost connection");
  if (found == links_.end() || !found->second.keeps || lost.generation != found->second.generation)
    return {};
  Link& link = found->second;
  if (link.words.size() >= kMaxWords)
    return Status(Code::refused, "too many words of lost connections");
  const auto is_it = [&](const StripeState& state) {
    return !state.memory && state.hello.stripe == lost.stripe &&
           state.hello.generation == link.generation;
  };
  const auto up = std::find_if(link.stripes.begin(), link.stripes.end(),
                               [&](std::uint64_t id) { return is_it(stripes_.at(id)); });
  if (up != link.stripes.end()) {
    lose_stripe(*up, "the other end has lost it");
    if (!link.up) return {};
  } else if (!has_ended(link, lost.stripe)) {
    // (The other end may have dialled many of which nothing came here.)
    if (joined_ > link.peer.joined && lost.stripe >= link.next_stripe)
      return Status(Code::refused, "a word of a connection that never was");
    if (link.ended.size() >= 4 * kKnownEnded)
      return Status(Code::refused, "too many lost connections");
    // Not up here, and never to be: it may yet be dialled, or its hello be under way. (Of stripe 0
    // there may be more than one handshake, one for each address; it was up, since the link is.)
    (void)note_ended(link, lost.stripe);
    const auto half_open = std::find_if(stripes_.begin(), stripes_.end(), [&](const auto& item) {
      return item.second.dialled && !item.second.established && item.second.peer == from &&
             is_it(item.second);
    });
    if (half_open != stripes_.end()) {
      if (link.spares_open > 0) --link.spares_open;
      close_stripe(half_open->first);
    }
    say_lost(link, lost.stripe, 0);
  }
  const auto it = link.limbo.find(lost.stripe);
  if (it == link.limbo.end()) return {};
  link::LeftFrames left = std::move(it->second.left);
  link.limbo.erase(it);
  if (lost.received < left.first || lost.received > left.first + left.frames.size())
    return Status(Code::refused, "an impossible word of a lost connection");
  std::uint64_t unsent = 0;
  for (std::size_t i = lost.received - left.first; i < left.frames.size(); ++i) {
    link::OutgoingFrame& frame = left.frames[i];
    switch (link::type_of(frame)) {
      case link::FrameType::hello:
      case link::FrameType::welcome:
      case link::FrameType::refused:
      case link::FrameType::heartbeat:
      case link::FrameType::ping:
      case link::FrameType::pong:
      case link::FrameType::probe:
      case link::FrameType::offer:
      case link::FrameType::wanted:  // asked again
      case link::FrameType::lost:    // said again when the stripe was lost
        continue;
      default:
        break;
    }
    if (frame.released) {
      unsent += frame.eager_bytes;
      continue;
    }
    ++sent_again_;
    link.again.push_back(std::move(frame));
  }
  if (unsent > 0) executor_.eager_unsent(from, unsent);
  wake(from);
  return {};
}

// So much has come on it since it was looked at last.
void Engine::count_for_prober(StripeState& state) {
  if (!prober_.active() || state.memory) return;
  const std::uint64_t all = state.stripe->bytes_received();
  prober_.on_bytes(state.peer, all - std::exchange(state.bytes_at_probe, all), now_);
}

void Engine::confirm(link::Stripe& stripe) {
  if (!stripe.owes_confirmation() || this->stripe(stripe.id()) != &stripe) return;
  stripe.push_heartbeat();
  flush_.insert(stripe.id());
}

// Looks how fast links are with as many stripes as they have, and changes that.
void Engine::tune_stripes() {
  for (auto& [peer, link] : links_) {
    if (!link.up || !link.keeps || joined_ <= link.peer.joined) continue;
    dial_spares(link);
    const bool busy = executor_.operation_count() > 0 || transfer_.active();
    link.window_busy = link.window_busy && busy;
    const std::size_t wanted = stripes_wanted(link) + (link.memory ? 1U : 0U);
    link.window_complete = link.window_complete && link.stripes.size() == wanted;
    const Duration span = now_ - link.window_since;
    if (span < kTuneWindow) continue;
    std::uint64_t bytes = 0;
    std::uint64_t least = ~std::uint64_t{0};
    std::uint64_t idlest = 0;
    for (const std::uint64_t id : link.stripes) {
      StripeState& state = stripes_.at(id);
      const std::uint64_t all = state.stripe->bytes_sent() + state.stripe->bytes_received();
      const std::uint64_t moved = all - std::exchange(state.bytes_at_window, all);
      bytes += moved;
      if (moved < least && !state.memory) {
        least = moved;
        idlest = id;
      }
    }
    link.tuner.window(bytes, std::chrono::duration<double>(span).count(), link.window_busy,
                      link.window_complete);
    link.window_since = now_;
    link.window_busy = busy;
    link.window_complete = true;
    const std::size_t now_wanted = stripes_wanted(link) + (link.memory ? 1U : 0U);
    if (link.stripes.size() > now_wanted && idlest != 0) {
      lose_stripe(idlest, "one connection fewer is enough");
    }
    dial_spares(link);
  }
}

// ---- what transfers show of the ways

// Links to other hosts that the plan uses, while something moves on them: all of them carry parts
// of the same operations. Between operations, how long a word takes.
void Engine::watch_rates() {
  const Duration span = now_ - std::exchange(rates_looked_, now_);
  const bool busy = executor_.operation_count() > 0;
  // One that came late may have been a pause of this whole process.
  const bool in_time = span <= options_.settings.heartbeat_interval / 2;
  const bool counts = std::exchange(rates_busy_, busy) && busy && in_time && !prober_.active();
  std::vector<measured::LiveRates::Way> ways;
  const bool pings = !busy && !prober_.active() && now_ >= next_pings_;
  if (pings) next_pings_ = now_ + kPingEvery;
  for (auto& [peer, link] : links_) {
    measured::LiveRates::Way way{peer, 0, 0, false};
    bool local = false;
    std::size_t waiting = 0;
    for (const std::uint64_t id : link.stripes) {
      StripeState& state = stripes_.at(id);
      const std::uint64_t sent = state.stripe->bytes_sent();
      const std::uint64_t received = state.stripe->bytes_received();
      way.sent += sent - std::exchange(state.sent_at_look, sent);
      way.received += received - std::exchange(state.received_at_look, received);
      waiting += state.stripe->idle() ? 0 : 1;
      local = local || state.local;
    }
    // One of many connections may wait for a packet that was lost; and few may have all there is.
    way.full = waiting > 0 && 8 * waiting >= link.stripes.size();
    if (!link.up || !link.planned || link.memory || !link.member || local ||
        locality_.shares_with(peer))
      continue;
    ways.push_back(way);
    if (!pings) continue;
    link.ping_due = true;
    wake(peer);
  }
  if (!counts || ways.empty()) return live_rates_.skip();
  live_rates_.look(ways, span);
  tell_rates();
}

void Engine::on_pong(const PeerId& peer, const link::FrameHeader& header) {
  const auto it = links_.find(peer);
  if (it == links_.end() || !it->second.pinged) return;
  const Instant asked{Instant::duration(static_cast<Instant::rep>(header.attempt))};
  if (asked != *it->second.pinged) return;
  it->second.pinged.reset();
  // An answer that met an operation may have waited for it.
  if (executor_.operation_count() > 0 || prober_.active() || !session_.member()) return;
  live_rates_.on_round_trip(peer, now_ - asked);
  tell_rates();
}

void Engine::tell_rates() {
  const Record& world = record();
  if (!world || !session_.member()) return;
  const std::size_t n = world->members.size();
  if (n > topology::kMaxTable) return;
  std::size_t mine = 0;
  std::map<PeerId, std::size_t> ranks;
  for (std::size_t rank = 0; rank < n; ++rank) {
    ranks[world->members[rank].id] = rank;
    if (world->members[rank].id == id()) mine = rank;
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
                       now_);
  if (news != wire::Measurements{}) session_.measured(news);
}

// A new epoch is a new chance for every link; reports of the epoch before may have been too late.
void Engine::renew_links() {
  for (auto& [peer, link] : links_) {
    link.reported = false;
    link.next_memory_dial = now_ + kMemoryDialPause;
    if (!link.up) link.down_since = now_;
  }
}

void Engine::on_stripe_failed(std::uint64_t id, const Error& error, Instant now) {
  if (error.code != Code::refused) return on_stripe_failed(id, error.reason, now);
  const auto it = stripes_.find(id);
  const auto link = it == stripes_.end() ? links_.end() : links_.find(it->second.peer);
  if (link == links_.end() || !it->second.established)
    return on_stripe_failed(id, error.reason, now);
  now_ = now;
  log(LogLevel::debug, "link to " + it->second.peer.brief() + " broke: " + error.reason);
  link_down(link->second, error.reason, link->second.planned);
}

void Engine::on_stripe_failed(std::uint64_t id, const std::string& reason, Instant now) {
  now_ = now;
  const auto it = stripes_.find(id);
  if (it == stripes_.end()) return;
  StripeState& state = it->second;
  if (!state.established && !state.offered_to.empty()) {
    const auto offered = links_.find(state.offered_to);
    if (offered != links_.end()) offered->second.last_failure = failure_at(state.address, reason);
    return close_stripe(id);
  }
  const auto found = links_.find(state.peer);
  if (found == links_.end()) return close_stripe(id);
  Link& link = found->second;
  if (state.established) {
    log(LogLevel::debug, "a connection to " + state.peer.brief() + " broke: " + reason);
    return lose_stripe(id, reason);
  }
  if (state.dialled && state.memory) {
    link.dials_memory = false;
  } else if (state.dialled) {
    link.last_failure = failure_at(state.address, reason);
    if (state.hello.stripe == 0) {
      if (link.dials_open > 0) --link.dials_open;
      // While another handshake of this generation is under way, it may be the one that the other
      // end has taken, and why it closed this one.
      link.renews = std::none_of(stripes_.begin(), stripes_.end(), [&](const auto& item) {
        const StripeState& other = item.second;
        return item.first != id && other.dialled && !other.established &&
               other.peer == state.peer && other.hello.stripe == 0 && !other.memory;
      });
    } else {
      if (link.spares_open > 0) --link.spares_open;
      pause_spares(link);
      // It may be up at the other end, and something be sent on it.
      if (link.keeps && note_ended(link, state.hello.stripe)) say_lost(link, state.hello.stripe, 0);
    }
  }
  close_stripe(id);
}

bool Engine::established(std::uint64_t id) const {
  const auto it = stripes_.find(id);
  return it != stripes_.end() && it->second.established;
}

link::Stripe* Engine::stripe(std::uint64_t id) {
  const auto it = stripes_.find(id);
  return it == stripes_.end() ? nullptr : it->second.stripe.get();
}

void Engine::wake(const PeerId& peer) {
  const auto it = links_.find(peer);
  if (it == links_.end() || !it->second.up) return;
  flush_.insert(it->second.stripes.begin(), it->second.stripes.end());
}

std::uint64_t Engine::release(const PeerId& peer, std::uint64_t token) {
  const auto it = links_.find(peer);
  if (it == links_.end()) return 0;
  Link& link = it->second;
  std::uint64_t dropped = 0;
  for (const std::uint64_t id : link.stripes) {
    const auto state = stripes_.find(id);
    if (state != stripes_.end()) dropped += state->second.stripe->release(token);
  }
  for (auto& [number, limbo] : link.limbo) link::release(limbo.left.frames, token);
  std::erase_if(link.again, [&](const link::OutgoingFrame& frame) {
    if (frame.token != token) return false;
    dropped += frame.eager_bytes;
    return true;
  });
  return dropped;
}

bool Engine::checked(const PeerId& peer) {
  const auto it = links_.find(peer);
  return it != links_.end() && it->second.checked;
}

link::Placement Engine::place(link::Stripe& from, const link::FrameHeader& header) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end() || !it->second.established) {
    link::Placement refused;
    refused.kind = link::Placement::Kind::refuse;
    refused.reason = "data before the handshake";
    return refused;
  }
  const PeerId peer = it->second.peer;
  if (header.type == link::FrameType::state) return transfer_.place(peer, header);
  if (header.type == link::FrameType::probe) return {};  // drained
  return executor_.place(peer, header);
}

Status Engine::arrived(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token,
                       Buffer buffer) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return {};
  confirm(from);
  count_for_prober(it->second);
  const PeerId peer = it->second.peer;
  if (header.type == link::FrameType::state) {
    const Status status = transfer_.arrived(peer, header, std::move(buffer));
    if (sync_) {
      sync_->call->bytes_wanted = transfer_.bytes_wanted();
      sync_->call->bytes_done = transfer_.bytes_done();
    }
    return status;
  }
  return executor_.arrived(peer, header, token, std::move(buffer));
}

void Engine::voided(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return;
  confirm(from);
  const PeerId peer = it->second.peer;
  if (header.type == link::FrameType::state) return transfer_.voided(peer, header);
  executor_.voided(peer, header, token);
}

void Engine::drained(link::Stripe& from, const link::FrameHeader& header) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return;
  count_for_prober(it->second);
  const PeerId peer = it->second.peer;
  if (header.type == link::FrameType::data) executor_.drained(peer, header);
  confirm(from);
}

void Engine::interrupted(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return;
  if (header.type == link::FrameType::state) return transfer_.interrupted(header);
  const PeerId peer = it->second.peer;
  executor_.interrupted(peer, header, token);
}

Status Engine::control(link::Stripe& from, const link::FrameHeader& header,
                       std::span<const std::uint8_t> payload) {
  const auto it = stripes_.find(from.id());
  if (it == stripes_.end()) return {};
  switch (header.type) {
    case link::FrameType::hello:
    case link::FrameType::welcome:
    case link::FrameType::refused:
    case link::FrameType::offer:
      return on_hello(it->second, header, payload);
    default:
      break;
  }
  if (!it->second.established) return Status(Code::refused, "frames before the handshake");
  if (header.type == link::FrameType::heartbeat) {
    return from.confirm(header.attempt)
               ? Status{}
               : Status(Code::refused, "more frames were confirmed than were sent");
  }
  // A copy: what it says may be the end of this stripe.
  const PeerId peer = it->second.peer;
  if (header.type == link::FrameType::lost) return on_lost(peer, payload);
  if (header.type == link::FrameType::wanted) {
    confirm(from);
    return on_wanted(peer, header.credit);
  }
  confirm(from);
  if (header.type == link::FrameType::ping) {
    it->second.pong = header.attempt;  // the latest one is answered, however many there were
    flush_.insert(from.id());
    return {};
  }
  if (header.type == link::FrameType::pong) {
    prober_.on_pong(peer, header, now_);
    on_pong(peer, header);
    return {};
  }
  if (header.type == link::FrameType::probed) {
    prober_.on_probed(peer, header);
    return {};
  }
  if (header.type == link::FrameType::fetch) return transfer_.control(peer, header, payload);
  return executor_.control(peer, header);
}

bool Engine::next(link::Stripe& to, link::OutgoingFrame& frame) {
  const auto it = stripes_.find(to.id());
  if (it == stripes_.end() || !it->second.established) return false;
  const PeerId peer = it->second.peer;
  const auto found = links_.find(peer);
  if (found == links_.end()) return false;
  Link& link = found->second;
  if (const auto asked = std::exchange(it->second.pong, {})) {
    link::FrameHeader answer;
    answer.type = link::FrameType::pong;
    answer.attempt = *asked;
    frame = link::make_frame(answer);
    return true;
  }
  for (auto* first : {&link.words, &link.again}) {
    if (first->empty() || it->second.memory) continue;
    frame = std::move(first->front());
    first->pop_front();
    return true;
  }
  // What goes through memory is faster than what goes beside it.
  if (link.memory && !it->second.memory) return false;
  if (std::exchange(link.ping_due, false)) {
    link::FrameHeader ping;
    ping.type = link::FrameType::ping;
    ping.attempt = static_cast<std::uint64_t>(now_.time_since_epoch().count());
    frame = link::make_frame(ping);
    link.pinged = now_;
    return true;
  }
  if (prober_.next_word(peer, now_, frame) || executor_.next(peer, frame) ||
      transfer_.next(peer, frame))
    return true;
  // A few connections are enough to fill the way, and one stays free for what is said then.
  const std::size_t many = link.stripes.size();
  const std::size_t few = std::min(prober_.fillers(), many > 1 ? many - 1 : many);
  const auto end = link.stripes.begin() + static_cast<std::ptrdiff_t>(few);
  return std::find(link.stripes.begin(), end, to.id()) != end &&
         prober_.next_filler(peer, now_, frame);
}

// Signs of life on every link, silence, links that do not come up.
void Engine::watch_links() {
  std::vector<std::uint64_t> mute;
  std::vector<PeerId> hopeless;
  std::vector<PeerId> silent;  // about what came
  bool repeated = false;
  std::vector<PeerId> ahead;
  // Until then the master has been heard again, or this peer is out.
  const Duration catch_up =
      options_.settings.reconnect_timeout + options_.settings.heartbeat_timeout;
  const Duration linger = options_.settings.heartbeat_timeout;
  for (auto it = links_.begin(); it != links_.end();) {
    Link& link = it->second;
    const bool over = !link.wanted && (!link.up || now_ - link.unwanted_since >= linger);
    if (over) link_down(link, "not needed any more", false);
    it = over ? links_.erase(it) : std::next(it);
  }
  for (auto& [peer, link] : links_) {
    const bool member =
        record() != nullptr && std::any_of(record()->members.begin(), record()->members.end(),
                                           [&](const auto& m) { return m.id == link.peer.id; });
    if (!link.up) {
      const bool overdue = link.wanted &&
                           now_ - link.down_since >= options_.settings.link_timeout &&
                           (member || prepare_);
      if (!overdue) continue;
      if (link.last_failure.empty()) link.last_failure = "no connection came about";
      if (!link.planned) {
        hopeless.push_back(peer);
      } else if (!link.reported) {
        session_.report_link(peer, wire::LinkState::unreachable, link.last_failure);
        link.reported = true;
        if (prepare_) {
          // The master may know that the member is silent, and wait: say it again.
          link.reported = false;
          link.down_since = now_;
          link.in_vain = repeated = true;
        }
      }
      continue;
    }
    bool heard = false;
    for (const auto& [number, limbo] : link.limbo) {
      if (now_ - limbo.since >=
          options_.settings.link_timeout + options_.settings.heartbeat_timeout)
        silent.push_back(peer);
    }
    for (const std::uint64_t id : link.stripes) {
      StripeState& state = stripes_.at(id);
      if (state.stripe->unconfirmed() > kMaxUnconfirmed) silent.push_back(peer);
      if (!state.stripe->held()) {
        state.held_since.reset();
      } else if (!state.held_since) {
        state.held_since = now_;
      } else if (now_ - *state.held_since >= catch_up) {
        ahead.push_back(peer);
      }
      if (state.stripe->bytes_received() != state.bytes_heard || state.stripe->held()) {
        state.bytes_heard = state.stripe->bytes_received();
        state.heard = now_;
        heard = true;
      }
      if (state.stripe->bytes_sent() == state.bytes_sent && state.stripe->idle()) {
        state.stripe->push_heartbeat();
        flush_.insert(id);
      }
      state.bytes_sent = state.stripe->bytes_sent();
    }
    if (heard) link.heard = now_;
    if (heard && std::exchange(link.reported, false))
      session_.report_link(peer, mended(link), "it is heard again");
    if (now_ - link.heard < options_.settings.heartbeat_timeout) {
      // One connection may be dead while the others live, and neither end be told.
      // An idle one is heard every other interval at least.
      const Settings& settings = options_.settings;
      const Duration patience =
          link.keeps ? std::max(settings.link_timeout, 4 * settings.heartbeat_interval)
                     : settings.heartbeat_timeout;
      for (const std::uint64_t id : link.stripes) {
        if (link.heard - stripes_.at(id).heard >= patience) mute.push_back(id);
      }
    } else if (!link.planned) {
      // Nobody's operations depend on it: a new connection may do.
      link_down(link, "nothing heard on the link", false);
    } else if (!link.reported && member) {
      link.reported = true;
      session_.report_link(peer, wire::LinkState::silent, "nothing heard on the link");
    }
  }
  for (const std::uint64_t id : mute) {
    on_stripe_failed(id, "nothing heard on one of the link's connections", now_);
  }
  for (const PeerId& peer : silent) {
    Link& link = links_.at(peer);
    if (link.up) link_down(link, "the other end does not say what has come", link.planned);
  }
  if (repeated) check_prepared();
  for (const PeerId& peer : ahead) {
    Link& link = links_.at(peer);
    if (link.up) link_down(link, "it sends data of an epoch that does not come", link.planned);
  }
  for (const PeerId& peer : hopeless) transfer_.give_up(peer, links_.at(peer).last_failure);
}

}  // namespace pccl::peer
