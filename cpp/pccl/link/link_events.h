// The vocabulary of links: their phases, what goes into the LinkTable, and what comes out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "pccl/base/log.h"
#include "pccl/base/settings.h"
#include "pccl/link/stripe.h"
#include "pccl/link/stripe_tuner.h"
#include "pccl/wire/records.h"

namespace pccl::link {

// A link's life. `kTransitions` in link_facts.cpp lists every change.
enum class LinkPhase : std::uint8_t {
  connecting,  // needed; no stripe is up
  up,          // needed; at least one stripe is up
  lingering,   // not needed; at least one stripe is up, since the next plan may need it again
  ended,       // not needed; no stripe is up. The next on_watch erases the entry
};
inline constexpr std::size_t kLinkPhases = 4;
[[nodiscard]] const char* name(LinkPhase phase);

struct LinkTransition {
  LinkPhase from;
  LinkPhase to;
  const char* cause;
};
// All legal changes of phase. The first one creates a link.
[[nodiscard]] std::span<const LinkTransition> link_transitions();

// A stripe's life, before and after its handshake.
enum class StripePhase : std::uint8_t {
  awaits_hello,  // waits for a hello or an offer
  offered,       // this end dialled and sent an offer; it waits for a hello
  said_hello,    // this end sent a hello; it waits for the answer
  parked,        // holds a hello or an offer of a peer that the next epoch may name
  refusing,      // the refusal is being sent; the stripe ends at its deadline
  established,
};

enum class Way : std::uint8_t { network, memory, relay };

// A connection that the shell has opened or accepted.
struct Path {
  bool local = false;     // both ends are on one host
  Duration round_trip{};  // 0: unknown
  PeerId neighbour{};     // not zero: through shared memory, with this peer
};

inline constexpr std::size_t kMaxStripes = 256;  // of one link

// A connection that the shell must open.
struct DialRequest {
  std::uint64_t token = 0;
  wire::Address address;
  PeerId neighbour;      // not zero: through shared memory, to this peer
  PeerId peer;           // expected at the other end; zero: the address is only tried
  RelayToken relay{};    // not zero: through the master; this end's token (wire::Relay)
  bool accepts = false;  // through the master: the other end sends the hello
};

struct LinkActions {
  std::vector<DialRequest> dials;
  std::vector<std::uint64_t> flush;  // stripes that may have frames to write
  std::vector<std::uint64_t> close;  // write queued frames without blocking, then close
};

// The first stripe of a link is up.
struct LinkUp {
  PeerId peer;
};
// The last stripe of a link is gone. Frames in flight on it are lost.
struct LinkDown {
  PeerId peer;
  UnsentBytes unsent;  // queued, and will never be sent
};
// A report for the master.
struct LinkStateReport {
  PeerId peer;
  wire::LinkState state;
  std::string reason;
};
// A request for the master: relayed connections to that peer.
struct RelayWanted {
  PeerId peer;
  std::uint32_t stripes;
};
// A link was not established in time.
struct LinkFailed {
  PeerId peer;
  bool planned;
  std::string reason;
};
// Eager bytes to that peer will never be sent.
struct EagerUnsent {
  PeerId peer;
  std::uint64_t bytes;
};
// Answers LinkTable::try_address.
struct AddressTried {
  std::uint64_t question;
  bool reached;
  std::string reason;
};
struct LinkNotice {
  LogLevel level;
  std::string text;
};
using LinkEvent = std::variant<LinkUp, LinkDown, LinkStateReport, RelayWanted, LinkFailed,
                               EagerUnsent, AddressTried, LinkNotice>;

// A link that is needed.
struct LinkTarget {
  wire::Member peer;
  // Used by the plan, or by a newcomer that prepares; otherwise only by a sync or a measurement.
  bool planned = false;
  bool may_relay = false;  // the master relays it if no connection can be established
};

// The state of the owner at the time of an event.
struct LinkContext {
  Instant now{};
  std::uint64_t run = 0;
  std::uint64_t joined = 0;  // this peer's join ordinal; the newer of two peers sends the hello
  std::uint64_t abort_floor = 0;
  bool member = false;      // this peer is in an epoch
  bool preparing = false;   // this peer is a newcomer that has received Prepare
  bool may_report = false;  // the control connection is up
  bool reducing = false;    // an operation runs over links
  bool transferring = false;
};

struct LinkOptions {
  PeerId self;
  Settings settings;
  StripeTuner::Options stripes;       // of a link to another host, unless the settings fix a number
  std::uint32_t stripe_budget = 256;  // over all such links
  std::uint32_t local_stripes = 1;    // of a link on one host, unless the settings fix a number
  bool encrypted = false;             // links are encrypted: frames need no checksums
};

// The bytes that one link has moved since the previous call of flows().
struct LinkFlow {
  PeerId peer;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  bool full = false;     // at least an eighth of its stripes have frames queued
  bool network = false;  // a planned link to a member over a network
};

}  // namespace pccl::link
