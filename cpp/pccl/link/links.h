// All links of one peer: which are needed, how they are established, their stripes, and how they
// end. Pure: events and the time come in, LinkEvents and LinkActions go out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/log.h"
#include "pccl/base/settings.h"
#include "pccl/link/carrier.h"
#include "pccl/link/frame.h"
#include "pccl/link/standby.h"
#include "pccl/link/stripe.h"
#include "pccl/link/stripe_tuner.h"
#include "pccl/wire/records.h"

namespace pccl::link {

// A link's life. `kTransitions` in links.cpp lists every change.
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

inline constexpr std::size_t kMaxStripes = 256;  // of one link

// A connection that the shell must open.
struct DialRequest {
  std::uint64_t token = 0;
  wire::Address address;
  PeerId neighbour;      // not zero: through shared memory, to this peer
  PeerId peer;           // expected at the other end; zero: the address is only tried
  PeerId relay{};        // not zero: through the master; this end's token (wire::Relay)
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

// *one thread: the engine's*
class LinkTable final : public Carrier {
 public:
  // `traffic` places received payloads and supplies frames to send.
  LinkTable(LinkOptions options, Traffic& traffic)
      : options_(std::move(options)), traffic_(traffic) {}

  // -- which links are needed
  // Makes `targets` the needed links. Links to other peers end, or linger if they are up.
  // `members`: of this epoch.
  void want(const std::map<PeerId, LinkTarget>& targets, const std::set<PeerId>& members,
            const LinkContext& context);
  // A new epoch begins. Reports of the previous epoch may have reached the master too late, so
  // faults are reported again.
  void begin_epoch(const LinkContext& context);
  // The newcomer has received another Prepare: resets has_failed for all links.
  void forget_failures();
  // This process was suspended: bytes of the other peers are still unread. Restarts all timeouts
  // for silence.
  void excuse_silence(Instant now);
  void close_all(const LinkContext& context);

  // -- connections
  // `stripe`: an id that the shell never reuses. `local`: both ends are on one host. `way`: network
  // or memory.
  void on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Way way,
                  const LinkContext& context);
  void on_dial_failed(std::uint64_t token, const std::string& reason, const LinkContext& context);
  // `neighbour`: the peer at the other end of a pipe; empty for a socket.
  void on_accepted(std::uint64_t stripe, bool local, const PeerId& neighbour,
                   const LinkContext& context);
  // The connection ended. Code::refused: the other end violated the protocol, so the whole link
  // ends.
  void on_stripe_failed(std::uint64_t stripe, const Error& error, const LinkContext& context);
  // The master offers a connection through itself.
  void on_relay(const PeerId& peer, const PeerId& token, const LinkContext& context);
  // The master asks whether this peer can reach an address. Answered by AddressTried.
  void try_address(std::uint64_t question, const wire::Address& address);

  // -- frames
  // Handles a frame of the link itself. Nothing: the frame is the traffic's.
  [[nodiscard]] std::optional<Status> on_control(Stripe& from, const FrameHeader& header,
                                                 std::span<const std::uint8_t> payload,
                                                 const LinkContext& context);
  // True with the link's own next frame in `frame`. If there is none, `traffic_may` reports whether
  // the traffic may send a frame on this stripe.
  [[nodiscard]] bool next(Stripe& to, OutgoingFrame& frame, bool& traffic_may, Instant now);
  // Call after each complete frame: confirms received frames to the other end from time to time.
  void confirm(Stripe& stripe);
  // Returns the round-trip time. Nothing: the pong does not answer the latest ping of the link.
  [[nodiscard]] std::optional<Duration> on_pong(const PeerId& peer, const FrameHeader& header,
                                                Instant now);

  // -- time
  void on_time(const LinkContext& context);   // starts dials that are due
  void on_tick(const LinkContext& context);   // call a few times per heartbeat interval
  void on_watch(const LinkContext& context);  // call each heartbeat interval: checks links
  [[nodiscard]] Instant next_deadline(const LinkContext& context) const;
  // Dials a pipe for each planned link to a peer for which `shares_memory` holds.
  template <class Predicate>
  void dial_pipes(const Predicate& shares_memory, const LinkContext& context) {
    at_ = context;
    for (auto& [peer, link] : links_)
      if (may_dial_pipe(link) && shares_memory(peer)) dial_pipe(link);
  }

  // -- state
  [[nodiscard]] bool contains(const PeerId& peer) const { return links_.contains(peer); }
  [[nodiscard]] bool is_up(const PeerId& peer) const override;
  [[nodiscard]] bool is_checked(const PeerId& peer) const override;
  // The link could not be established since the last Prepare, and is not up.
  [[nodiscard]] bool has_failed(const PeerId& peer) const;
  // The link is not planned, this peer dials it, and no stripe of it was ever up.
  [[nodiscard]] bool never_worked(const PeerId& peer, const LinkContext& context) const;
  // The state of all planned links, for a master that may have no reports of them.
  [[nodiscard]] std::vector<LinkStateReport> report_all(const LinkContext& context) const;
  // Null: the stripe must be closed.
  [[nodiscard]] Stripe* stripe(std::uint64_t id);
  [[nodiscard]] bool is_established(std::uint64_t id) const { return peer_of(id) != nullptr; }
  // The peer at the other end; null until the stripe is established.
  [[nodiscard]] const PeerId* peer_of(std::uint64_t id) const;
  [[nodiscard]] std::vector<std::uint64_t> held_stripes() const;
  [[nodiscard]] std::size_t stripe_count() const { return stripes_.size(); }
  // The stripe is one of the first `count` of its link. If the link has more than `spare` stripes,
  // its last `spare` do not count.
  [[nodiscard]] bool is_among_first(std::uint64_t id, std::size_t count, std::size_t spare) const;
  [[nodiscard]] std::uint64_t stand_ins() const { return stand_ins_; }
  [[nodiscard]] std::uint64_t sent_again() const { return sent_again_; }
  // How often each entry of link_transitions() was taken.
  [[nodiscard]] std::span<const std::uint64_t> transitions_taken() const { return taken_; }

  // -- bytes moved
  [[nodiscard]] std::vector<LinkFlow> flows();
  [[nodiscard]] std::uint64_t moved_since_last();  // over all established stripes
  void begin_probe();
  // Bytes since the previous call or begin_probe(); 0 for a pipe.
  [[nodiscard]] std::uint64_t received_since_probe(std::uint64_t id);
  void ping(const PeerId& peer);

  // -- memory of operations
  void wake(const PeerId& peer) override;
  std::uint64_t release(const PeerId& peer, std::uint64_t token) override;
  [[nodiscard]] std::uint64_t unsent(const PeerId& peer, std::uint64_t token) const override;

  [[nodiscard]] bool has_flush() const { return !flush_.empty(); }
  [[nodiscard]] std::vector<LinkEvent> take_events() { return std::exchange(events_, {}); }
  [[nodiscard]] LinkActions take_actions();

 private:
  enum class Pipe : std::uint8_t { none, dialling, up };
  // Stripes after the first that are being established, and when more may be dialled.
  struct Spares {
    std::uint32_t next_number = 1;
    std::uint32_t open = 0;  // dials and handshakes in progress
    Instant next{};
    Duration pause{};
    std::uint32_t asked = 0;  // requested from the other end, which alone can dial; not offered yet
    Instant asked_until{};
  };
  // How the first stripe is established.
  struct Dialling {
    std::size_t next_address = 0;
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
    bool told = false;  // a warning was logged
    Instant next{};     // when to request connections
    unsigned tries = 0;
  };
  // A measurement of the link's rate with its present number of stripes.
  struct Window {
    StripeTuner tuner;
    Instant since{};
    bool busy = true;
    bool complete = true;
  };
  struct Link {
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
    // The fault last reported to the master in this epoch: unreachable or silent.
    std::optional<wire::LinkState> told;
    bool failed = false;            // see has_failed
    std::uint64_t broke_under = 0;  // abort floor at the latest break: its attempts lack bytes
    Instant heard{};
    bool ping_due = false;
    std::optional<Instant> pinged;
    [[nodiscard]] bool is_up() const {
      return phase == LinkPhase::up || phase == LinkPhase::lingering;
    }
    [[nodiscard]] bool is_wanted() const {
      return phase == LinkPhase::connecting || phase == LinkPhase::up;
    }
  };
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
  struct Entry {
    std::unique_ptr<Stripe> stripe;
    StripePhase phase = StripePhase::awaits_hello;
    Way way = Way::network;
    bool local = false;
    PeerId peer;                       // zero until a hello is sent or accepted
    PeerId only;                       // the only peer allowed at the other end; zero: any peer
    PeerId offered_to;                 // this end dialled and sent an offer to this peer
    std::uint32_t offered_number = 0;  // 0: to establish the link
    bool offer = false;                // `hello` is an offer
    Hello hello;
    wire::Address address;
    Instant deadline{};  // of the handshake
    Instant heard{};
    std::optional<Instant> held_since;  // its next frame is of a later epoch
    Marks marks;
    std::optional<std::uint64_t> pong;  // `attempt` of the ping to answer
  };
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

  static constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
  // The other end violates the protocol.
  [[nodiscard]] static Status refused(const char* why) { return Status(Code::refused, why); }

  // links.cpp
  void move(Link& link, LinkPhase to);
  void take_down(Link& link, const std::string& reason, bool report);
  void dial(Link& link, const wire::Address& address, std::uint32_t number, bool offer);
  void dial_due();
  [[nodiscard]] static Instant dial_time(const Link& link, const LinkContext& context);
  [[nodiscard]] bool may_dial_pipe(const Link& link) const;
  void dial_pipe(Link& link);
  [[nodiscard]] static Instant relay_time(const Link& link, const LinkContext& context);
  [[nodiscard]] Duration relay_pause() const;
  void ask_for_relay(Link& link);
  void begin_generation(Link& link);
  [[nodiscard]] static std::uint32_t& open_dials(Link& link, std::uint32_t number);
  static void note_failure(Link& link, const wire::Address& address, const std::string& reason);
  void log(LogLevel level, std::string text);

  // handshake.cpp
  Entry& add(std::uint64_t stripe, bool local, Way way);
  void say_hello(Entry& entry, Link& link, std::uint32_t number, std::uint64_t generation);
  void offer(Entry& entry, const Link& link);
  [[nodiscard]] Status on_greeting(Entry& entry, const FrameHeader& header,
                                   std::span<const std::uint8_t> payload);
  void refuse(Entry& entry);
  void park(Entry& entry);
  void accept(Entry& entry);
  void accept_offer(Entry& entry);
  void accept_hello(Entry& entry);
  void establish(Entry& entry);
  void bring_up(Entry& entry, Link& link, bool ours);
  void close(std::uint64_t id);
  void end_offer(Entry& entry);
  void fail_handshake(Entry& entry, Link& link, const std::string& reason);

  // stripes.cpp
  [[nodiscard]] std::uint32_t stripes_wanted(const Link& link) const;
  [[nodiscard]] std::size_t connections_wanted(const Link& link) const;
  void pause_spares(Link& link);
  void dial_spares(Link& link);
  void ask_for_stripes(Link& link);
  [[nodiscard]] Status on_wanted(Link& link, std::uint32_t count);
  void lose(std::uint64_t id, const std::string& reason);
  [[nodiscard]] Status on_lost(const PeerId& from, std::span<const std::uint8_t> payload);
  [[nodiscard]] Status lost_before_it_was_up(Link& link, const Lost& lost);
  void tune(Link& link);
  void tell_lost(Link& link, std::uint32_t number, std::uint64_t received);

  // health.cpp
  void watch_connecting(Link& link);
  void watch_up(Link& link);
  [[nodiscard]] bool hear(Link& link);
  [[nodiscard]] const char* fault_of(const Link& link) const;

  LinkOptions options_;
  Traffic& traffic_;
  LinkContext at_;  // of the current event
  std::map<PeerId, Link> links_;
  std::map<std::uint64_t, Entry> stripes_;
  std::map<std::uint64_t, Dial> dials_;
  std::vector<Entry> closed_;  // kept while a call of their stripes may be on the stack
  std::uint64_t next_token_ = 1;
  std::uint64_t next_generation_ = 1;
  std::set<std::uint64_t> flush_;
  LinkActions actions_;
  std::vector<LinkEvent> events_;
  std::uint64_t stand_ins_ = 0;
  std::uint64_t sent_again_ = 0;
  std::array<std::uint64_t, 8> taken_{};
};

}  // namespace pccl::link
