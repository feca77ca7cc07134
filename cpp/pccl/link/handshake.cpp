#include "pccl/link/handshake.h"

#include <algorithm>
#include <utility>

namespace pccl::link {
namespace {

// Hellos for a link may still arrive for this long after its end.
constexpr Duration kLateHello = std::chrono::seconds(1);
constexpr std::size_t kMaxParked = 64;
// Stripes that are not established and have not sent a hello. Offers and pipes count, too. The
// shell chooses which pending connections to close (io/pending_connections.h).
constexpr std::size_t kMaxHandshakes = 2048;
constexpr std::size_t kMaxReason = 256;  // bytes of a refusal to report
constexpr unsigned kRelayStripes = 2;

}  // namespace

void Handshakes::greet(Stripe& stripe, FrameType type, Hello hello) {
  hello.heartbeat_ms = in_milliseconds(facts_.options.settings.heartbeat_interval);
  stripe.push(make_checked_frame({.type = type}, wire::encoded(hello)));
}

StripeEntry& Handshakes::add(std::uint64_t stripe, const Path& path, Way way) {
  StripeEntry& entry = facts_.stripes[stripe];
  entry.stripe = std::make_unique<Stripe>(stripe, facts_.traffic);
  entry.local = path.local;
  entry.way = path.neighbour.empty() ? way : Way::memory;
  entry.round_trip = path.round_trip;
  entry.deadline = facts_.at.now + kHandshakeTimeout;
  return entry;
}

void Handshakes::on_dialled(std::uint64_t token, std::uint64_t stripe, const Path& path,
                            const LinkContext& context) {
  facts_.at = context;
  const auto it = facts_.dials.find(token);
  if (it == facts_.dials.end()) {
    facts_.actions.close.push_back(stripe);
    return;
  }
  const Dial dial = it->second;
  facts_.dials.erase(it);
  if (dial.question != 0) {
    facts_.events.emplace_back(AddressTried{dial.question, true, {}});
    facts_.actions.close.push_back(stripe);
    return;
  }
  if (dial.accepts) {
    on_accepted(stripe, path, context);
    const auto accepted = facts_.stripes.find(stripe);
    if (accepted == facts_.stripes.end()) return;
    accepted->second.only = dial.peer;
    accepted->second.way = Way::relay;
    return;
  }
  const auto found = facts_.links.find(dial.peer);
  const bool useful =
      found != facts_.links.end() &&
      (dial.number == 0 ? !found->second.is_up()
                        : found->second.is_up() && found->second.generation == dial.generation &&
                              (dial.offer || !found->second.standby.has_ended(dial.number)));
  if (!useful) {
    if (found != facts_.links.end() && dial.way != Way::memory) {
      std::uint32_t& open = found->second.open_dials(dial.number);
      if (open > 0) --open;
    }
    facts_.actions.close.push_back(stripe);
    return;
  }
  Link& link = found->second;
  StripeEntry& entry = add(stripe, path, dial.way);
  entry.address = dial.address;
  // A pipe needs no deadline: a late answer costs nothing, and pipes of a lost neighbour end.
  if (entry.way == Way::memory) entry.deadline = Instant::max();
  if (dial.offer) {
    entry.offered_number = dial.number;
    return offer(entry, link);
  }
  // A first handshake belongs to the newest generation at its beginning.
  if (dial.number == 0 && std::exchange(link.dialling.renews, false))
    dialler_.renew_generation(link);
  say_hello(entry, link, dial.number, dial.number == 0 ? link.generation : dial.generation);
}

void Handshakes::on_accepted(std::uint64_t stripe, const Path& path, const LinkContext& context) {
  facts_.at = context;
  const auto handshakes =
      std::count_if(facts_.stripes.begin(), facts_.stripes.end(), [](const auto& item) {
        const StripePhase phase = item.second.phase;
        return phase != StripePhase::established && phase != StripePhase::said_hello;
      });
  if (static_cast<std::size_t>(handshakes) >= kMaxHandshakes) {
    facts_.actions.close.push_back(stripe);
    return;
  }
  add(stripe, path, Way::network).only = path.neighbour;
}

void Handshakes::say_hello(StripeEntry& entry, Link& link, std::uint32_t number,
                           std::uint64_t generation) {
  entry.peer = link.peer.id;
  entry.phase = StripePhase::said_hello;
  const unsigned fixed = facts_.options.settings.stripes;
  const bool memory = entry.way == Way::memory;
  const std::uint32_t most =
      entry.local ? facts_.options.local_stripes : facts_.options.stripes.most;
  const bool several = (fixed == 0 ? most : fixed) > 1;
  const bool keeps = number == 0 ? several : !memory && link.keeps;
  entry.hello = {facts_.at.run, facts_.options.self, link.peer.id, generation, number, keeps,
                 memory};
  if (keeps) entry.stripe->keep();
  greet(*entry.stripe, FrameType::hello, entry.hello);
  facts_.flush.insert(entry.stripe->id());
}

// Asks the other end to send a hello on this stripe.
void Handshakes::offer(StripeEntry& entry, const Link& link) {
  entry.phase = StripePhase::offered;
  entry.offered_to = link.peer.id;
  // Keep frames until the hello decides: kept frames are counted from the first one.
  entry.stripe->keep();
  greet(*entry.stripe, FrameType::offer,
        {facts_.at.run, facts_.options.self, link.peer.id, 0, entry.offered_number, false, false});
  facts_.flush.insert(entry.stripe->id());
}

Status Handshakes::on_greeting(StripeEntry& entry, const FrameHeader& header,
                               std::span<const std::uint8_t> payload) {
  const StripePhase phase = entry.phase;
  const bool offered = !entry.offered_to.empty();
  const bool is_offer = header.type == FrameType::offer;
  const bool is_greeting = header.type == FrameType::hello || is_offer;
  const bool answers_offer = header.type == FrameType::refused && offered;
  const bool in_turn =
      (phase == StripePhase::said_hello && !is_greeting) ||
      (phase == StripePhase::offered && (header.type == FrameType::hello || answers_offer)) ||
      (phase == StripePhase::awaits_hello && is_greeting &&
       !(is_offer && entry.way == Way::memory));
  if (!in_turn) return refused("a handshake out of turn");
  if (header.type == FrameType::refused) {
    const std::size_t size = std::min(payload.size(), kMaxReason);
    return Status(Code::refused,
                  "refused: " + std::string(payload.begin(),
                                            payload.begin() + static_cast<std::ptrdiff_t>(size)));
  }
  Hello hello;
  wire::Reader reader(payload);
  reader(hello);
  if (!reader.complete()) return refused("a malformed handshake");
  entry.their_interval = std::chrono::milliseconds(hello.heartbeat_ms);
  if (!is_greeting) {
    if (hello.from != entry.peer || hello.to != facts_.options.self)
      return refused("another peer answered");
    establish(entry);
    return {};
  }
  entry.hello = hello;
  entry.offer = is_offer;
  if (offered && hello.from != entry.offered_to) return refused("another peer answered");
  if (hello.to != facts_.options.self || (facts_.at.run != 0 && hello.run != facts_.at.run) ||
      hello.memory != (entry.way == Way::memory) ||
      (!entry.only.empty() && hello.from != entry.only)) {
    refuse(entry);
  } else if (!facts_.links.contains(hello.from)) {
    park(entry);
  } else {
    accept(entry);
  }
  return {};
}

void Handshakes::refuse(StripeEntry& entry) {
  const std::string_view why = entry.hello.to != facts_.options.self ? kAnotherPeer : kAnotherRun;
  entry.stripe->push(make_frame({.type = FrameType::refused}, wire::Bytes(why.begin(), why.end())));
  facts_.flush.insert(entry.stripe->id());
  entry.phase = StripePhase::refusing;
  entry.deadline = facts_.at.now;  // the next tick closes it, after the answer is written
}

// The sender may be a peer of the next epoch. It waits until the handshake's deadline.
void Handshakes::park(StripeEntry& entry) {
  std::size_t parked = 0;
  std::uint64_t oldest = 0;
  for (const auto& [id, other] : facts_.stripes) {
    if (other.phase != StripePhase::parked) continue;
    if (parked++ == 0) oldest = id;
  }
  entry.phase = StripePhase::parked;
  if (parked >= kMaxParked) facts_.close(oldest);
}

void Handshakes::accept(StripeEntry& entry) {
  entry.phase = StripePhase::awaits_hello;
  if (entry.offer) {
    accept_offer(entry);
  } else {
    accept_hello(entry);
  }
}

// This end is the newer peer. It sends a hello on the older peer's connection, as on its own dials.
void Handshakes::accept_offer(StripeEntry& entry) {
  const std::uint64_t id = entry.stripe->id();
  const auto it = facts_.links.find(entry.hello.from);
  if (it == facts_.links.end() || facts_.at.joined <= it->second.peer.joined)
    return facts_.close(id);
  Link& link = it->second;
  if (!link.is_up()) {
    if (!link.is_wanted() || entry.hello.stripe != 0) return facts_.close(id);
    dialler_.begin_generation(link);
    ++link.dialling.open;
    return say_hello(entry, link, 0, link.generation);
  }
  if (link.spares.asked == 0 || entry.hello.stripe == 0 || !link.keeps) return facts_.close(id);
  --link.spares.asked;
  ++link.spares.open;
  say_hello(entry, link, link.spares.next_number++, link.generation);
}

void Handshakes::accept_hello(StripeEntry& entry) {
  const auto it = facts_.links.find(entry.hello.from);
  if (it == facts_.links.end()) return;
  Link& link = it->second;
  const std::uint64_t id = entry.stripe->id();
  const Hello& hello = entry.hello;
  // Only the newer of two peers may send a hello. Another member may send one in its name, but not
  // in the name of the older peer.
  if (link.peer.joined <= facts_.at.joined) return facts_.close(id);
  // Hellos of ended generations are late and must not establish a link. After kLateHello none are
  // left. Then forget the numbers, so that one that was far too high does not lock the peer out.
  if (hello.stripe == 0 && !link.is_up() && facts_.at.now - link.down_since >= kLateHello)
    link.generation = link.ended_generation = 0;
  if (hello.generation <= link.ended_generation || hello.generation < link.generation)
    return facts_.close(id);
  if (hello.stripe == 0) {
    if (hello.generation != link.generation) {
      if (link.is_up()) facts_.take_down(link, "replaced by a new connection", link.planned);
      link.generation = hello.generation;
    }
    if (link.is_up()) return facts_.close(id);  // it is up through another address of this peer
    link.keeps = hello.keeps;
  } else if (!link.is_up() || hello.generation != link.generation ||
             link.standby.has_ended(hello.stripe) || (hello.keeps != link.keeps && !hello.memory)) {
    return facts_.close(id);
  }
  for (const std::uint64_t other : link.stripes)
    if (facts_.stripes.at(other).hello.stripe == hello.stripe) return facts_.close(id);
  if (link.stripes.size() >= kMaxStripes) return facts_.close(id);
  if (hello.keeps) {
    entry.stripe->keep();
  } else {
    entry.stripe->keep_nothing();
  }
  entry.peer = hello.from;
  greet(*entry.stripe, FrameType::welcome,
        {facts_.at.run, facts_.options.self, entry.peer, hello.generation, hello.stripe,
         hello.keeps, hello.memory});
  establish(entry);
}

void Handshakes::establish(StripeEntry& entry) {
  Link& link = facts_.links.at(entry.peer);
  facts_.end_offer(entry);
  const bool ours = entry.phase == StripePhase::said_hello;
  entry.phase = StripePhase::established;
  entry.established = entry.heard = entry.spoke = facts_.at.now;
  link.their_interval = entry.their_interval;
  const std::uint64_t id = entry.stripe->id();
  const bool first = entry.hello.stripe == 0;
  if (ours && first && link.is_up()) return facts_.close(id);  // another address was faster
  link.stripes.push_back(id);
  facts_.flush.insert(id);
  link.note_round_trip(entry.round_trip);
  if (entry.way == Way::memory) link.pipe = Link::Pipe::up;
  link.relay.tries = 0;
  if (first) return bring_up(entry, link, ours);
  if (ours && entry.way != Way::memory && link.spares.open > 0) --link.spares.open;
  link.spares.pause = {};
  link.spares.next = facts_.at.now;
  if (entry.way != Way::network) return;
  if (ours) {
    spares_.on_answered(link);
  } else {
    spares_.end_stalled(link);
  }
}

// `ours`: this end sent the hello.
void Handshakes::bring_up(StripeEntry& entry, Link& link, bool ours) {
  facts_.move(link, link.is_wanted() ? LinkPhase::up : LinkPhase::lingering);
  const bool relayed = entry.way == Way::relay;
  link.generation = entry.hello.generation;
  link.reported.reset();
  link.failed = false;
  link.relay.used = relayed;
  if (link.planned && facts_.at.member) {
    facts_.events.emplace_back(
        LinkStateReport{link.peer.id, relayed ? wire::LinkState::relayed : wire::LinkState::mended,
                        "it came about"});
  }
  link.heard = link.unwanted_since = facts_.at.now;
  const Checksum checksum = facts_.options.settings.checksum;
  link.checked = checksum == Checksum::always ||
                 (checksum == Checksum::automatic && !entry.local && !facts_.options.encrypted);
  link.keeps = entry.hello.keeps;
  link.spares.next_number = 1;
  link.spares.asked = 0;
  link.dialling.offered = entry.offer || !entry.offered_to.empty();
  link.dialling.answered.reset();
  // The end whose dial succeeded dials the other stripes as well.
  if (ours != link.dialling.offered && !relayed) {
    link.dialling.answered = entry.address;
    // When the link breaks, what has worked is dialled first.
    const std::vector<wire::Address>& addresses = link.peer.addresses;
    const auto worked = std::find(addresses.begin(), addresses.end(), entry.address);
    if (worked != addresses.end())
      link.dialling.next_address = static_cast<std::size_t>(worked - addresses.begin());
  }
  if (relayed && !std::exchange(link.relay.warned, true)) {
    facts_.log(LogLevel::warn,
               "no connection to peer " + wire::shown_name(link.peer.name, link.peer.id, true) +
                   " comes about, from either end: what goes between goes through the "
                   "master");
  }
  if (ours) {
    if (link.dialling.open > 0) --link.dialling.open;
    const unsigned fixed = facts_.options.settings.stripes;
    link.window.tuner =
        !link.keeps   ? StripeTuner(1)
        : relayed     ? StripeTuner(fixed == 0 ? kRelayStripes : std::min(fixed, kRelayStripes))
        : fixed != 0  ? StripeTuner(fixed)
        : entry.local ? StripeTuner(facts_.options.local_stripes)
                      : StripeTuner(facts_.options.stripes);
    link.window.since = facts_.at.now;
    spares_.dial_spares(link);
  }
  facts_.events.emplace_back(LinkUp{link.peer.id});
}

void Handshakes::fail_handshake(StripeEntry& entry, Link& link, const std::string& reason) {
  const std::uint64_t id = entry.stripe->id();
  if (entry.phase == StripePhase::said_hello && entry.way == Way::memory) {
    if (link.pipe == Link::Pipe::dialling) link.pipe = Link::Pipe::none;
  } else if (entry.phase == StripePhase::said_hello) {
    link.note_failure(entry.address, reason);
    const std::uint32_t number = entry.hello.stripe;
    std::uint32_t& open = link.open_dials(number);
    if (open > 0) --open;
    if (number == 0) {
      // Keep the generation while another handshake of it is in progress: the other end may have
      // accepted that one and closed this one for it.
      link.dialling.renews =
          std::none_of(facts_.stripes.begin(), facts_.stripes.end(), [&](const auto& item) {
            const StripeEntry& other = item.second;
            return item.first != id && other.phase == StripePhase::said_hello &&
                   other.peer == entry.peer && other.hello.stripe == 0 && other.way != Way::memory;
          });
    } else {
      facts_.pause_spares(link);
      // The stripe may be up at the other end, which may have sent frames on it.
      if (link.keeps && link.standby.note_ended(number)) stand_ins_.tell_lost(link, number, 0);
    }
  }
  facts_.close(id);
}

}  // namespace pccl::link
