// LinkTable: the handshake of a stripe.
#include <algorithm>
#include <utility>

#include "pccl/link/links.h"

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

void greet(Stripe& stripe, FrameType type, const Hello& hello) {
  wire::Bytes payload;
  wire::Writer writer(payload);
  writer(hello);
  stripe.push(make_checked_frame(type, std::move(payload)));
}

}  // namespace

LinkTable::Entry& LinkTable::add(std::uint64_t stripe, bool local, Way way) {
  Entry& entry = stripes_[stripe];
  entry.stripe = std::make_unique<Stripe>(stripe, traffic_);
  entry.local = local;
  entry.way = way;
  entry.deadline = at_.now + kHandshakeTimeout;
  return entry;
}

void LinkTable::on_accepted(std::uint64_t stripe, bool local, const PeerId& neighbour,
                            const LinkContext& context) {
  at_ = context;
  const auto handshakes = std::count_if(stripes_.begin(), stripes_.end(), [](const auto& item) {
    const StripePhase phase = item.second.phase;
    return phase != StripePhase::established && phase != StripePhase::said_hello;
  });
  if (static_cast<std::size_t>(handshakes) >= kMaxHandshakes) {
    actions_.close.push_back(stripe);
    return;
  }
  add(stripe, local, neighbour.empty() ? Way::network : Way::memory).only = neighbour;
}

void LinkTable::say_hello(Entry& entry, Link& link, std::uint32_t number,
                          std::uint64_t generation) {
  entry.peer = link.peer.id;
  entry.phase = StripePhase::said_hello;
  const unsigned fixed = options_.settings.stripes;
  const bool memory = entry.way == Way::memory;
  const bool several = fixed == 0 ? !entry.local && options_.stripes.most > 1 : fixed > 1;
  const bool keeps = number == 0 ? several : !memory && link.keeps;
  entry.hello = {at_.run, options_.self, link.peer.id, generation, number, keeps, memory};
  if (keeps) entry.stripe->keep();
  greet(*entry.stripe, FrameType::hello, entry.hello);
  flush_.insert(entry.stripe->id());
}

// Asks the other end to send a hello on this stripe.
void LinkTable::offer(Entry& entry, const Link& link) {
  entry.phase = StripePhase::offered;
  entry.offered_to = link.peer.id;
  // Keep frames until the hello decides: kept frames are counted from the first one.
  entry.stripe->keep();
  greet(*entry.stripe, FrameType::offer,
        {at_.run, options_.self, link.peer.id, 0, entry.offered_number, false, false});
  flush_.insert(entry.stripe->id());
}

Status LinkTable::on_greeting(Entry& entry, const FrameHeader& header,
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
  if (!is_greeting) {
    if (hello.from != entry.peer || hello.to != options_.self)
      return refused("another peer answered");
    establish(entry);
    return {};
  }
  entry.hello = hello;
  entry.offer = is_offer;
  if (offered && hello.from != entry.offered_to) return refused("another peer answered");
  if (hello.to != options_.self || (at_.run != 0 && hello.run != at_.run) ||
      hello.memory != (entry.way == Way::memory) ||
      (!entry.only.empty() && hello.from != entry.only)) {
    refuse(entry);
  } else if (!links_.contains(hello.from)) {
    park(entry);
  } else {
    accept(entry);
  }
  return {};
}

void LinkTable::refuse(Entry& entry) {
  const std::string_view why = entry.hello.to != options_.self ? kAnotherPeer : kAnotherRun;
  FrameHeader answer;
  answer.type = FrameType::refused;
  entry.stripe->push(make_frame(answer, wire::Bytes(why.begin(), why.end())));
  flush_.insert(entry.stripe->id());
  entry.phase = StripePhase::refusing;
  entry.deadline = at_.now;  // the next tick closes it, after the answer is written
}

// The sender may be a peer of the next epoch. It waits until the handshake's deadline.
void LinkTable::park(Entry& entry) {
  std::size_t parked = 0;
  std::uint64_t oldest = 0;
  for (const auto& [id, other] : stripes_) {
    if (other.phase != StripePhase::parked) continue;
    if (parked++ == 0) oldest = id;
  }
  entry.phase = StripePhase::parked;
  if (parked >= kMaxParked) close(oldest);
}

void LinkTable::accept(Entry& entry) {
  entry.phase = StripePhase::awaits_hello;
  if (entry.offer) {
    accept_offer(entry);
  } else {
    accept_hello(entry);
  }
}

// This end is the newer peer. It sends a hello on the older peer's connection, as on its own dials.
void LinkTable::accept_offer(Entry& entry) {
  const std::uint64_t id = entry.stripe->id();
  const auto it = links_.find(entry.hello.from);
  if (it == links_.end() || at_.joined <= it->second.peer.joined) return close(id);
  Link& link = it->second;
  if (!link.is_up()) {
    if (!link.is_wanted() || entry.hello.stripe != 0) return close(id);
    begin_generation(link);
    ++link.dialling.open;
    return say_hello(entry, link, 0, link.generation);
  }
  if (link.spares.asked == 0 || entry.hello.stripe == 0 || !link.keeps) return close(id);
  --link.spares.asked;
  ++link.spares.open;
  say_hello(entry, link, link.spares.next_number++, link.generation);
}

void LinkTable::accept_hello(Entry& entry) {
  const auto it = links_.find(entry.hello.from);
  if (it == links_.end()) return;
  Link& link = it->second;
  const std::uint64_t id = entry.stripe->id();
  const Hello& hello = entry.hello;
  // Only the newer of two peers may send a hello. Another member may send one in its name, but not
  // in the name of the older peer.
  if (link.peer.joined <= at_.joined) return close(id);
  // Hellos of ended generations are late and must not establish a link. After kLateHello none are
  // left. Then forget the numbers, so that one that was far too high does not lock the peer out.
  if (hello.stripe == 0 && !link.is_up() && at_.now - link.down_since >= kLateHello)
    link.generation = link.ended_generation = 0;
  if (hello.generation <= link.ended_generation || hello.generation < link.generation)
    return close(id);
  if (hello.stripe == 0) {
    if (hello.generation != link.generation) {
      if (link.is_up()) take_down(link, "replaced by a new connection", link.planned);
      link.generation = hello.generation;
    }
    if (link.is_up()) return close(id);  // it is up through another address of this peer
    link.keeps = hello.keeps;
  } else if (!link.is_up() || hello.generation != link.generation ||
             link.standby.has_ended(hello.stripe) || (hello.keeps != link.keeps && !hello.memory)) {
    return close(id);
  }
  for (const std::uint64_t other : link.stripes)
    if (stripes_.at(other).hello.stripe == hello.stripe) return close(id);
  if (link.stripes.size() >= kMaxStripes) return close(id);
  if (hello.keeps) {
    entry.stripe->keep();
  } else {
    entry.stripe->keep_nothing();
  }
  entry.peer = hello.from;
  greet(*entry.stripe, FrameType::welcome,
        {at_.run, options_.self, entry.peer, hello.generation, hello.stripe, hello.keeps,
         hello.memory});
  establish(entry);
}

void LinkTable::establish(Entry& entry) {
  Link& link = links_.at(entry.peer);
  end_offer(entry);
  const bool ours = entry.phase == StripePhase::said_hello;
  entry.phase = StripePhase::established;
  entry.heard = at_.now;
  const std::uint64_t id = entry.stripe->id();
  const bool first = entry.hello.stripe == 0;
  if (ours && first && link.is_up()) return close(id);  // another address was faster
  link.stripes.push_back(id);
  flush_.insert(id);
  if (entry.way == Way::memory) link.pipe = Pipe::up;
  link.relay.tries = 0;
  if (first) return bring_up(entry, link, ours);
  if (ours && entry.way != Way::memory && link.spares.open > 0) --link.spares.open;
  link.spares.pause = {};
  link.spares.next = at_.now;
}

// `ours`: this end sent the hello.
void LinkTable::bring_up(Entry& entry, Link& link, bool ours) {
  move(link, link.is_wanted() ? LinkPhase::up : LinkPhase::lingering);
  const bool relayed = entry.way == Way::relay;
  link.generation = entry.hello.generation;
  link.told.reset();
  link.failed = false;
  link.relay.used = relayed;
  if (link.planned && at_.member) {
    events_.emplace_back(
        LinkStateReport{link.peer.id, relayed ? wire::LinkState::relayed : wire::LinkState::mended,
                        "it came about"});
  }
  link.heard = link.unwanted_since = at_.now;
  const Checksum checksum = options_.settings.checksum;
  link.checked = checksum == Checksum::always ||
                 (checksum == Checksum::automatic && !entry.local && !options_.encrypted);
  link.keeps = entry.hello.keeps;
  link.spares.next_number = 1;
  link.spares.asked = 0;
  link.dialling.offered = entry.offer || !entry.offered_to.empty();
  link.dialling.answered.reset();
  // The end whose dial succeeded dials the other stripes as well.
  if (ours != link.dialling.offered && !relayed) link.dialling.answered = entry.address;
  if (relayed && !std::exchange(link.relay.told, true)) {
    log(LogLevel::warn, "no connection to peer " + link.peer.id.brief() +
                            " comes about, from either end: what goes between goes through the "
                            "master");
  }
  if (ours) {
    if (link.dialling.open > 0) --link.dialling.open;
    const unsigned fixed = options_.settings.stripes;
    link.window.tuner =
        !link.keeps  ? StripeTuner(1)
        : relayed    ? StripeTuner(fixed == 0 ? kRelayStripes : std::min(fixed, kRelayStripes))
        : fixed != 0 ? StripeTuner(fixed)
                     : StripeTuner(options_.stripes);
    link.window.since = at_.now;
    dial_spares(link);
  }
  events_.emplace_back(LinkUp{link.peer.id});
}

void LinkTable::close(std::uint64_t id) {
  const auto it = stripes_.find(id);
  if (it == stripes_.end()) return;
  end_offer(it->second);
  actions_.close.push_back(id);
  closed_.push_back(std::move(it->second));
  stripes_.erase(it);
  flush_.erase(id);
}

// Counts an offer of this end as no longer open, unless it was established before.
void LinkTable::end_offer(Entry& entry) {
  if (entry.offered_to.empty() || entry.phase == StripePhase::established) return;
  const auto it = links_.find(entry.offered_to);
  if (it == links_.end()) return;
  std::uint32_t& open = open_dials(it->second, entry.offered_number);
  if (open > 0) --open;
}

// The connection ended before its handshake was over.
void LinkTable::fail_handshake(Entry& entry, Link& link, const std::string& reason) {
  const std::uint64_t id = entry.stripe->id();
  if (entry.phase == StripePhase::said_hello && entry.way == Way::memory) {
    if (link.pipe == Pipe::dialling) link.pipe = Pipe::none;
  } else if (entry.phase == StripePhase::said_hello) {
    note_failure(link, entry.address, reason);
    const std::uint32_t number = entry.hello.stripe;
    std::uint32_t& open = open_dials(link, number);
    if (open > 0) --open;
    if (number == 0) {
      // Keep the generation while another handshake of it is in progress: the other end may have
      // accepted that one and closed this one for it.
      link.dialling.renews = std::none_of(stripes_.begin(), stripes_.end(), [&](const auto& item) {
        const Entry& other = item.second;
        return item.first != id && other.phase == StripePhase::said_hello &&
               other.peer == entry.peer && other.hello.stripe == 0 && other.way != Way::memory;
      });
    } else {
      pause_spares(link);
      // The stripe may be up at the other end, which may have sent frames on it.
      if (link.keeps && link.standby.note_ended(number)) tell_lost(link, number, 0);
    }
  }
  close(id);
}

}  // namespace pccl::link
