// All links of one peer: which are needed, how they come about, their stripes, and their end.
// Pure: events and the time come in, LinkEvents and LinkActions go out.
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
  connecting,  // needed, and no stripe is up
  up,          // needed, and at least one stripe is up
  lingering,   // up, and not needed: the next plan may need it again
  ended,       // neither; the entry is erased at the next look
};
inline constexpr std::size_t kLinkPhases = 4;
[[nodiscard]] const char* name(LinkPhase phase);

struct LinkTransition {
  LinkPhase from;
  LinkPhase to;
  const char* cause;
};
// Every change of phase that is legal; the first one enters `connecting` from nothing.
[[nodiscard]] std::span<const LinkTransition> link_transitions();

// A stripe's life, before and after its handshake.
enum class StripePhase : std::uint8_t {
  awaits_hello,  // the other end speaks first
  offered,       // we dialled, and the other end is to say hello
  said_hello,    // we wait for the answer to our hello
  parked,        // a hello, or an offer, of a peer that the next epoch may name
  refusing,      // the refusal is on its way out; the stripe ends at its deadline
  established,
};

enum class Way : std::uint8_t { network, memory, relay };

inline constexpr std::size_t kMaxStripes = 256;  // of one link, whoever dials

// A connection that the shell is to bring about.
struct DialRequest {
  std::uint64_t token = 0;
  wire::Address address;
  PeerId neighbour;  // not zero: through memory, to this peer
  PeerId peer;       // who is to answer at the address; zero: the address is only tried
  // Not zero: through the master, which knows this end by this token.
  PeerId relay{};
  bool accepts = false;  // through the master: the other end says hello
};

struct LinkActions {
  std::vector<DialRequest> dials;
  std::vector<std::uint64_t> flush;  // stripes that may have something to write
  std::vector<std::uint64_t> close;  // flush what is lined up without waiting, then close
};

// The first stripe of a link is up.
struct LinkUp {
  PeerId peer;
};
// The last stripe of a link is gone; what was under way on it is lost.
struct LinkDown {
  PeerId peer;
  UnsentBytes unsent;  // will never be sent
};
// For the master.
struct LinkReport {
  PeerId peer;
  wire::LinkState state;
  std::string reason;
};
// For the master: connections to that peer that go through it.
struct RelayWanted {
  PeerId peer;
  std::uint32_t stripes;
};
// A link did not come about in time.
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
// The answer to one of the master's questions whether an address can be reached.
struct AddressTried {
  std::uint64_t question;
  bool reached;
  std::string reason;
};
struct LinkNotice {
  LogLevel level;
  std::string text;
};
using LinkEvent = std::variant<LinkUp, LinkDown, LinkReport, RelayWanted, LinkFailed, EagerUnsent,
                               AddressTried, LinkNotice>;

// A link that is needed.
struct LinkTarget {
  wire::Member peer;
  bool planned = false;    // the plan uses it, or a newcomer prepares it; else only state moves
  bool may_relay = false;  // where no connection comes about, it goes through the master
};

// What the owner knows at the time of an event.
struct LinkContext {
  Instant now{};
  std::uint64_t run = 0;
  std::uint64_t joined = 0;  // this peer's join ordinal; of two peers the newer one says hello
  std::uint64_t abort_floor = 0;
  bool member = false;      // this peer is in an epoch
  bool preparing = false;   // it is a newcomer that the master has told to prepare
  bool may_report = false;  // the master hears it
  bool reducing = false;    // an operation runs over links
  bool transferring = false;
};

struct LinkOptions {
  PeerId self;
  Settings settings;
  StripeTuner::Options stripes;  // of a link to another host, unless the settings name a number
  std::uint32_t stripe_budget = 256;  // over all such links
  bool encrypted = false;             // what leaves this process needs no checksums
};

// Bytes of one link since the last look, and what they say.
struct LinkFlow {
  PeerId peer;
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
  bool full = false;     // stripes wait to be written
  bool network = false;  // a planned link to a member over a network
};

// *one thread: the engine's*
class LinkTable final : public Carrier {
 public:
  // `traffic` is asked where payloads go and what to send.
  LinkTable(LinkOptions options, Traffic& traffic)
      : options_(std::move(options)), traffic_(traffic) {}

  // -- which links are needed
  // Links to other peers end, or linger if they are up. `members`: of this epoch.
  void want(const std::map<PeerId, LinkTarget>& targets, const std::set<PeerId>& members,
            const LinkContext& context);
  // A new epoch: what the master was told of links before may have come too late.
  void begin_epoch(const LinkContext& context);
  // A newcomer prepares anew.
  void forget_failures();
  // This process was frozen, not the others: what they sent is still to be read.
  void excuse_silence(Instant now);
  void close_all(const LinkContext& context);

  // -- connections. `stripe` is an id that the shell never uses again. `local`: both ends are on
  // one host. `way` is network or memory.
  void on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Way way,
                  const LinkContext& context);
  void on_dial_failed(std::uint64_t token, const std::string& reason, const LinkContext& context);
  // `neighbour`: who is at the other end of the memory; empty for a socket.
  void on_accepted(std::uint64_t stripe, bool local, const PeerId& neighbour,
                   const LinkContext& context);
  // The connection ended. Code::refused: the other end misbehaves, and the whole link ends.
  void on_stripe_failed(std::uint64_t stripe, const Error& error, const LinkContext& context);
  // The master offers a connection through itself.
  void on_relay(const PeerId& peer, const PeerId& token, const LinkContext& context);
  // The master asks whether this peer reaches an address; answered by AddressTried.
  void try_address(std::uint64_t question, const wire::Address& address);

  // -- frames
  // A frame that belongs to the link itself. Nothing: it is for the traffic.
  [[nodiscard]] std::optional<Status> on_control(Stripe& from, const FrameHeader& header,
                                                 std::span<const std::uint8_t> payload,
                                                 const LinkContext& context);
  // The next frame of the link itself; `traffic_may`: there is none, and the traffic may send one.
  [[nodiscard]] bool next(Stripe& to, OutgoingFrame& frame, bool& traffic_may, Instant now);
  // A frame is complete: tells the other end now and then how many are.
  void confirm(Stripe& stripe);
  // The answer to a ping of this link; nothing: an old one.
  [[nodiscard]] std::optional<Duration> on_pong(const PeerId& peer, const FrameHeader& header,
                                                Instant now);

  // -- time
  void on_time(const LinkContext& context);   // dials that are due
  void on_tick(const LinkContext& context);   // a few times per heartbeat interval
  void on_watch(const LinkContext& context);  // each heartbeat interval: silence, hopeless links
  [[nodiscard]] Instant next_deadline(const LinkContext& context) const;
  // Dials a pipe through memory for each planned link to a peer that `shares_memory`.
  template <class Predicate>
  void dial_pipes(const Predicate& shares_memory, const LinkContext& context) {
    at_ = context;
    for (auto& [peer, link] : links_)
      if (may_dial_pipe(link) && shares_memory(peer)) dial_pipe(link);
  }

  // -- what the table knows
  [[nodiscard]] bool contains(const PeerId& peer) const { return links_.contains(peer); }
  [[nodiscard]] bool is_up(const PeerId& peer) const override;
  [[nodiscard]] bool is_checked(const PeerId& peer) const override;
  // It failed since the newcomer was told to prepare, and is not up.
  [[nodiscard]] bool has_failed(const PeerId& peer) const;
  // No connection ever came about, though this peer dials, and the plan does without it.
  [[nodiscard]] bool never_worked(const PeerId& peer, const LinkContext& context) const;
  // What to tell a master that may know nothing of the planned links.
  [[nodiscard]] std::vector<LinkReport> report_all(const LinkContext& context) const;
  // Null when the stripe is to be closed.
  [[nodiscard]] Stripe* stripe(std::uint64_t id);
  [[nodiscard]] bool is_established(std::uint64_t id) const { return peer_of(id) != nullptr; }
  // The peer at the other end; null before the handshake is over.
  [[nodiscard]] const PeerId* peer_of(std::uint64_t id) const;
  [[nodiscard]] std::vector<std::uint64_t> held_stripes() const;
  [[nodiscard]] std::size_t stripe_count() const { return stripes_.size(); }
  // One of the first `count` stripes of its link.
  [[nodiscard]] bool is_among_first(std::uint64_t id, std::size_t count, std::size_t spare) const;
  [[nodiscard]] std::uint64_t stand_ins() const { return stand_ins_; }
  [[nodiscard]] std::uint64_t sent_again() const { return sent_again_; }
  // How often each entry of link_transitions() was taken.
  [[nodiscard]] std::span<const std::uint64_t> transitions_taken() const { return taken_; }

  // -- bytes moved, for who watches them
  [[nodiscard]] std::vector<LinkFlow> flows();
  [[nodiscard]] std::uint64_t moved_since_last();  // over all established stripes
  void begin_probe();
  [[nodiscard]] std::uint64_t received_since_probe(std::uint64_t id);  // 0 for memory
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
  // Stripes of this end that are on their way, and when the next ones may be.
  struct Spares {
    std::uint32_t next_number = 1;
    std::uint32_t open = 0;  // dials and handshakes under way
    Instant next{};
    Duration pause{};
    std::uint32_t asked = 0;  // of the end that can dial, and not there yet
    Instant asked_until{};
  };
  // How the first stripe comes about.
  struct Dialling {
    std::size_t next_address = 0;
    std::uint32_t open = 0;
    Instant next{};
    bool renews = false;                    // the next dial is of a new generation
    std::string failure;                    // the latest one
    std::optional<wire::Address> answered;  // the other end did here; nothing: it dialled us
    bool offered = false;                   // the older end dialled
  };
  struct Relaying {
    bool allowed = false;
    bool used = false;
    bool told = false;
    Instant next{};  // to be asked for
    unsigned tries = 0;
  };
  // A measurement of how fast the link is with as many stripes as it has.
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
    bool member = false;  // of this epoch; else a newcomer, or we are one
    bool planned = false;
    std::uint64_t generation = 0;
    std::uint64_t ended_generation = 0;  // no stripe of it, or of one before, comes up again
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
    // What the master was told in this epoch: unreachable or silent.
    std::optional<wire::LinkState> told;
    bool failed = false;            // see has_failed
    std::uint64_t broke_under = 0;  // the abort floor at the latest break: bytes are missing
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
  // Bytes of a stripe when somebody looked last.
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
    PeerId peer;                       // zero until the hello
    PeerId only;                       // who alone may be at the other end; zero: anybody
    PeerId offered_to;                 // we dialled, and offered it to this peer
    std::uint32_t offered_number = 0;  // 0: to bring the link about
    bool offer = false;                // `hello` is an offer
    Hello hello;
    wire::Address address;
    Instant deadline{};  // of the handshake
    Instant heard{};
    std::optional<Instant> held_since;  // its next frame is of an epoch yet to come
    Marks marks;
    std::optional<std::uint64_t> pong;  // owed for the ping with that number
  };
  struct Dial {
    PeerId peer;
    wire::Address address;
    std::uint32_t number = 0;  // of the stripe; 0: to bring the link about
    Way way = Way::network;
    std::uint64_t generation = 0;
    bool offer = false;
    bool accepts = false;        // relayed: the other end says hello
    std::uint64_t question = 0;  // of try_address; the rest is not used
  };

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
  LinkContext at_;  // of the event that is being handled
  std::map<PeerId, Link> links_;
  std::map<std::uint64_t, Entry> stripes_;
  std::map<std::uint64_t, Dial> dials_;
  std::vector<Entry> closed_;  // until no call of their stripes can be on the stack
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
