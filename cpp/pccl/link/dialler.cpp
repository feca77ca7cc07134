#include "pccl/link/dialler.h"

#include <algorithm>
#include <utility>

namespace pccl::link {
namespace {

// Between dials to the addresses of one peer.
constexpr Duration kDialStagger = std::chrono::milliseconds(200);
// Between requests for a relay.
constexpr Duration kRelayPause = std::chrono::seconds(1);
// After kRelayTries requests without success, a link waits this long for each link that needs a
// relay. So all links together ask no more often than the master answers (master::Limits::wants).
constexpr Duration kRelayTurn = std::chrono::milliseconds(150);
constexpr unsigned kRelayTries = 3;
constexpr std::size_t kMaxRelayDials = 256;
constexpr std::size_t kMaxQuestions = 8;

}  // namespace

void Dialler::begin_generation(Link& link) {
  const bool renews = std::exchange(link.dialling.renews, false);
  if (link.dialling.open == 0 || renews) renew_generation(link);
}

void Dialler::dial(Link& link, const wire::Address& address, std::uint32_t number, bool offer) {
  const std::uint64_t token = next_token_++;
  facts_.dials[token] = {link.peer.id,    address, number, Way::network,
                         link.generation, offer,   false,  0};
  ++link.open_dials(number);
  facts_.actions.dials.push_back({token, address, {}, link.peer.id});
}

// The newer peer of a pair dials one address after the other until one answers. If it cannot
// connect, the older one dials as well, and the newer one sends its hello on that connection. So
// the newer peer numbers generations and stripes in both cases.
void Dialler::dial_due() {
  for (auto& [peer, link] : facts_.links) {
    const bool offers = facts_.at.joined < link.peer.joined;
    const std::vector<wire::Address>& addresses = link.peer.addresses;
    while (facts_.at.now >= link.dial_time(facts_.at) && link.dialling.open < addresses.size()) {
      if (offers) {
        link.dialling.renews = false;
      } else {
        begin_generation(link);
      }
      dial(link, addresses[link.dialling.next_address++ % addresses.size()], 0, offers);
      link.dialling.next = facts_.at.now + dial_stagger(link);
    }
    if (!link.is_up() && facts_.at.now >= link.relay_time(facts_.at)) ask_for_relay(link);
  }
}

// All addresses of a peer are tried once before it counts as unreachable.
Duration Dialler::dial_stagger(Link& link) const {
  const std::size_t count = link.peer.addresses.size();
  if (++link.dialling.tried >= count) return kDialStagger;
  const Duration half = facts_.options.settings.link_timeout / 2;
  return std::min(kDialStagger, half / static_cast<Duration::rep>(count));
}

Instant Dialler::next_deadline(const LinkContext& context) const {
  Instant next = Instant::max();
  for (const auto& [peer, link] : facts_.links) {
    if (link.dialling.open < link.peer.addresses.size())
      next = std::min(next, link.dial_time(context));
    if (!link.is_up()) next = std::min(next, link.relay_time(context));
  }
  return next;
}

bool Dialler::may_dial_pipe(const Link& link) const {
  return link.is_up() && link.pipe == Link::Pipe::none && facts_.at.joined > link.peer.joined &&
         facts_.at.now >= link.next_pipe_dial;
}

void Dialler::dial_pipe(Link& link) {
  link.pipe = Link::Pipe::dialling;
  link.next_pipe_dial = facts_.at.now + kPipeDialPause;
  const std::uint64_t token = next_token_++;
  const std::uint32_t number = link.spares.next_number++;
  facts_.dials[token] = {link.peer.id, {}, number, Way::memory, link.generation, false, false, 0};
  facts_.actions.dials.push_back({token, {}, link.peer.id, link.peer.id});
}

void Dialler::forget_spares(Link& link) {
  // on_dialled closes their connections.
  const auto forgotten = std::erase_if(facts_.dials, [&](const auto& item) {
    const Dial& dial = item.second;
    return dial.question == 0 && dial.peer == link.peer.id && dial.number != 0 &&
           dial.way == Way::network;
  });
  link.spares.open -= std::min(link.spares.open, static_cast<std::uint32_t>(forgotten));
}

void Dialler::on_dial_failed(std::uint64_t token, const std::string& reason,
                             const LinkContext& context) {
  facts_.at = context;
  const auto it = facts_.dials.find(token);
  if (it == facts_.dials.end()) return;
  const Dial dial = it->second;
  facts_.dials.erase(it);
  if (dial.question != 0) {
    facts_.events.emplace_back(AddressTried{dial.question, false, reason});
    return;
  }
  const auto found = facts_.links.find(dial.peer);
  if (found == facts_.links.end()) return;
  Link& link = found->second;
  if (dial.way == Way::memory) {
    if (link.pipe == Link::Pipe::dialling) link.pipe = Link::Pipe::none;
    return;
  }
  if (dial.accepts) return;  // the other end requests another one
  const bool relayed = dial.way == Way::relay;
  link.note_failure(dial.address, relayed ? "through the master: " + reason : reason);
  std::uint32_t& open = link.open_dials(dial.number);
  if (open > 0) --open;
  if (dial.number != 0) facts_.pause_spares(link);
}

void Dialler::try_address(std::uint64_t question, const wire::Address& address) {
  const auto open = std::count_if(facts_.dials.begin(), facts_.dials.end(),
                                  [](const auto& item) { return item.second.question != 0; });
  if (static_cast<std::size_t>(open) >= kMaxQuestions) {
    facts_.events.emplace_back(AddressTried{question, false, "too many questions"});
    return;
  }
  const std::uint64_t token = next_token_++;
  facts_.dials[token].question = question;
  facts_.actions.dials.push_back({token, address, {}, {}});
}

void Dialler::ask_for_relay(Link& link) {
  const std::size_t coming = link.stripes.size() + link.spares.open;
  const std::size_t wanted = link.is_up() ? facts_.stripes_wanted(link) : coming + 1;
  if (coming >= wanted) return;
  link.relay.next =
      facts_.at.now + (++link.relay.tries > kRelayTries ? relay_pause() : kRelayPause);
  facts_.events.emplace_back(
      RelayWanted{link.peer.id, static_cast<std::uint32_t>(wanted - coming)});
}

Duration Dialler::relay_pause() const {
  const auto waiting =
      std::count_if(facts_.links.begin(), facts_.links.end(), [&](const auto& item) {
        const Link& link = item.second;
        return link.relay_time(facts_.at) != Instant::max() &&
               (!link.is_up() ||
                (link.relay.used && link.stripes.size() < link.window.tuner.wanted()));
      });
  return std::max(kRelayPause, kRelayTurn * waiting);
}

// The master offers the connection to both ends. Dials to addresses go on; the first handshake to
// complete counts.
void Dialler::on_relay(const PeerId& peer, const RelayToken& relay, const LinkContext& context) {
  facts_.at = context;
  const auto it = facts_.links.find(peer);
  if (it == facts_.links.end() || facts_.dials.size() >= kMaxRelayDials) return;
  Link& link = it->second;
  const bool accepts = facts_.at.joined < link.peer.joined;
  std::uint32_t number = 0;
  if (!accepts) {
    const std::size_t coming = link.stripes.size() + link.spares.open;
    const bool has_enough =
        link.is_up() && (!link.relay.used || !link.keeps || coming >= facts_.stripes_wanted(link));
    if (!link.is_wanted() || has_enough) return;
    if (link.is_up()) {
      number = link.spares.next_number++;
    } else {
      begin_generation(link);
    }
    ++link.open_dials(number);
  }
  const std::uint64_t token = next_token_++;
  facts_.dials[token] = {peer, {}, number, Way::relay, link.generation, false, accepts, 0};
  facts_.actions.dials.push_back({token, {}, {}, peer, relay, accepts});
}

}  // namespace pccl::link
