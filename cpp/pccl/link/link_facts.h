// The facts about the links of one peer, and the changes that several parts make. The parts, each
// of which uses only those before it: Dialler, StandIns, Spares, Handshakes, Health, LinkTable.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/link/link_events.h"
#include "pccl/link/standby.h"

namespace pccl::link {

inline constexpr std::size_t kNewLink = 0;  // the transition of a new link
// The deadline of a stripe's handshake.
inline constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
// The pause between dials of a pipe.
inline constexpr Duration kPipeDialPause = std::chrono::seconds(1);

struct Link {
  enum class Pipe : std::uint8_t { none, dialling, up };
  // Stripes after the first that are being established, and when more may be dialled.
  struct Spares {
    std::uint32_t next_number = 1;
    std::uint32_t open = 0;    // dials and handshakes in progress
    std::size_t searches = 0;  // dials since the link is silent
    Instant next{};
    Duration pause{};
    std::uint32_t asked = 0;  // requested from the other end, which alone can dial; not offered yet
    Instant asked_until{};
    // Spares that were dialled together count as one failure.
    void pause_after_failure(Instant now);
  };
  // How the first stripe is established.
  struct Dialling {
    std::size_t next_address = 0;
    std::size_t tried = 0;  // addresses, since the link went down
    std::uint32_t open = 0;
    Instant next{};
    bool renews = false;                    // the next dial starts a new generation
    std::string failure;                    // the latest one
    std::optional<wire::Address> answered;  // where the other end answered; nothing: it dialled
    bool offered = false;                   // the older peer dialled
  };
  struct Relaying {
    bool allowed = false;
    bool used = false;
    bool warned = false;  // in the log
    Instant next{};       // when to request connections
    unsigned tries = 0;
  };
  // A measurement of the link's rate with its present number of stripes.
  struct Window {
    StripeTuner tuner;
    Instant since{};
    bool busy = true;
    bool complete = true;
  };

  wire::Member peer;
  LinkPhase phase = LinkPhase::connecting;
  Instant down_since{};
  Instant unwanted_since{};
  bool member = false;  // of this epoch; otherwise one of the two ends is a newcomer
  bool planned = false;
  std::uint64_t generation = 0;
  std::uint64_t ended_generation = 0;  // stripes of it and of earlier ones are refused
  std::vector<std::uint64_t> stripes;  // established
  bool checked = false;                // payloads carry checksums
  bool keeps = false;                  // stripes stand in for each other (Hello::keeps)
  Standby standby;
  Pipe pipe = Pipe::none;
  Instant next_pipe_dial{};
  Dialling dialling;
  Spares spares;
  Relaying relay;
  Window window;
  // The fault last reported to the master in this epoch, unreachable or silent. Not while it is up.
  std::optional<wire::LinkState> reported;
  bool failed = false;            // see has_failed
  std::uint64_t broke_under = 0;  // abort floor at the latest break: its attempts lack bytes
  Instant heard{};
  Duration their_interval{};  // between signs of life of the other end
  bool ping_due = false;
  std::optional<Instant> pinged;
  Duration round_trip{};  // the least of its connections and answered pings; 0: unknown
  [[nodiscard]] bool is_up() const {
    return phase == LinkPhase::up || phase == LinkPhase::lingering;
  }
  [[nodiscard]] bool is_wanted() const {
    return phase == LinkPhase::connecting || phase == LinkPhase::up;
  }
  // The number of dials and handshakes in progress for the link's first stripe, or for its others.
  [[nodiscard]] std::uint32_t& open_dials(std::uint32_t number) {
    return number == 0 ? dialling.open : spares.open;
  }
  void note_round_trip(Duration seen) {
    if (seen > Duration{}) round_trip = round_trip > Duration{} ? std::min(round_trip, seen) : seen;
  }
  // `address`: empty if the other end dialled.
  void note_failure(const wire::Address& address, const std::string& reason);
  // When this peer may dial the link's first stripe; max: not now.
  [[nodiscard]] Instant dial_time(const LinkContext& context) const;
  // When this peer may request relayed connections; max: not now.
  [[nodiscard]] Instant relay_time(const LinkContext& context) const;
};

// A connection, from its beginning to its end.
struct StripeEntry {
  // Byte counts of a stripe at the previous look of each user.
  struct Marks {
    std::uint64_t heard = 0;
    std::uint64_t sent = 0;
    std::uint64_t moved = 0;
    std::uint64_t window = 0;
    std::uint64_t probe = 0;
    std::uint64_t flow_sent = 0;
    std::uint64_t flow_received = 0;
  };

  std::unique_ptr<Stripe> stripe;
  StripePhase phase = StripePhase::awaits_hello;
  Way way = Way::network;
  bool local = false;
  Duration round_trip{};             // when it was made; 0: unknown
  PeerId peer;                       // zero until a hello is sent or accepted
  PeerId only;                       // the only peer allowed at the other end; zero: any peer
  PeerId offered_to;                 // this end dialled and sent an offer to this peer
  std::uint32_t offered_number = 0;  // 0: to establish the link
  bool offer = false;                // `hello` is an offer
  Hello hello;
  wire::Address address;
  Instant deadline{};  // of the handshake
  Instant established{};
  Instant heard{};
  Instant spoke{};                    // when it was seen to have sent something
  Duration their_interval{};          // between signs of life of the other end
  std::optional<Instant> held_since;  // its next frame is of a later epoch
  Marks marks;
  std::optional<std::uint64_t> pong;  // `attempt` of the ping to answer
};

// A connection that the shell is opening.
struct Dial {
  PeerId peer;
  wire::Address address;
  std::uint32_t number = 0;  // of the stripe; 0: to establish the link
  Way way = Way::network;
  std::uint64_t generation = 0;
  bool offer = false;
  bool accepts = false;        // relayed: the other end sends the hello
  std::uint64_t question = 0;  // of try_address; not 0: the other fields are unused
};

// *one thread: the engine's*
class LinkFacts {
 public:
  LinkFacts(LinkOptions given, Traffic& user) : options(std::move(given)), traffic(user) {}

  void move(Link& link, LinkPhase to);
  // Ends all stripes of the link. Frames in flight on it are lost.
  void take_down(Link& link, const std::string& reason, bool report);
  void close(std::uint64_t id);
  // Counts an offer of this end as no longer open, unless it was established before.
  void end_offer(StripeEntry& entry);
  // There may be frames to send to this peer.
  void wake(const PeerId& peer);
  // Nothing was heard since then for longer than heartbeats take: the path may be cut.
  [[nodiscard]] bool is_silent(const Link& link, Instant heard) const;
  // A dial of a stripe after the first has failed. On a silent link this says nothing.
  void pause_spares(Link& link) const;
  void log(LogLevel level, std::string text);
  // Without the pipe; within this peer's budget.
  [[nodiscard]] std::uint32_t stripes_wanted(const Link& link) const;
  // Stripes and the pipe.
  [[nodiscard]] std::size_t connections_wanted(const Link& link) const;

  LinkOptions options;
  Traffic& traffic;
  LinkContext at;      // of the current event
  Instant listened{};  // the last Health::listen()
  // There was no pause since then in which this process may have been frozen, with unread bytes.
  Instant awake_since{};
  std::map<PeerId, Link> links;
  std::map<std::uint64_t, StripeEntry> stripes;
  std::map<std::uint64_t, Dial> dials;
  std::vector<StripeEntry> closed;  // kept while a call of their stripes may be on the stack
  std::set<std::uint64_t> flush;
  LinkActions actions;
  std::vector<LinkEvent> events;
  std::array<std::uint64_t, 8> taken{};  // how often each entry of link_transitions() was
};

}  // namespace pccl::link
