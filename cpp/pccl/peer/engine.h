// One peer, whole: the session with the master, the links to other peers, the operations over them,
// and the calls of the user. Sans-I/O: a shell (runtime.cpp, or the simulator) brings events and
// carries out actions.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/settings.h"
#include "pccl/collective/executor.h"
#include "pccl/link/links.h"
#include "pccl/measured/live_rates.h"
#include "pccl/measured/prober.h"
#include "pccl/peer/calls.h"
#include "pccl/peer/locality.h"
#include "pccl/peer/master_link.h"
#include "pccl/peer/news.h"
#include "pccl/peer/session.h"
#include "pccl/peer/threads.h"
#include "pccl/reduce/quantize.h"
#include "pccl/state/transfer.h"

namespace pccl::peer {

// A member's state and what it says of it.
struct SyncRequest {
  std::shared_ptr<const state::LocalState> state;
  wire::SyncVote vote;     // its digests and ages are filled by the engine
  bool questions = false;  // the caller answers take_question(); the sync waits for that
};

struct EngineOptions {
  JoinOptions join;
  Settings settings;
  LocalityOptions locality;
  // How much is sent unasked (collective::ExecutorOptions); equal on all peers. Tests use less.
  std::uint32_t eager_bytes = 64 << 10;
  std::uint64_t eager_room = 1 << 20;
  link::StripeTuner::Options
      stripes;  // of a link to another host, where the settings name no number
  std::uint32_t stripe_budget = 256;  // over all such links
  bool encrypted = false;             // what leaves this process needs no checksums
  // At most so much is sent to each peer to measure the way there.
  std::uint64_t probe_bytes = std::uint64_t{1} << 40;
};

// What the shell has to do after it brought an event.
struct EngineActions {
  std::vector<wire::Bytes> control;  // write to the control connection
  bool dial_control = false;         // connect to the master (again)
  bool close_control = false;        // flush, then close
  std::vector<link::DialRequest>
      dials;                          // connect to a peer; answered by on_dialled or on_dial_failed
  std::vector<std::uint64_t> flush;   // stripes that may have something to write
  std::vector<std::uint64_t> resume;  // stripes that may be read again
  std::vector<std::uint64_t> close;   // flush what is lined up without waiting, then close
  std::vector<std::pair<LogLevel, std::string>> log;
  LocalityActions local;
  bool calls_ended = false;  // wake who waits for a call
};

// Where the peer stands in the run.
enum class Standing {
  joining,   // no answer of the master yet, or waiting to be let in
  newcomer,  // joined; a member from its first collective call on
  member,
  out,  // closed, evicted, cut off: `Engine::end()` says why
};

// *one thread at a time: whoever drives the loop*
class Engine final : private link::Traffic {
 public:
  Engine(const EngineOptions& options, std::shared_ptr<BufferPool> pool);
  ~Engine() override;

  // -- events
  void start(Instant now);  // dials the master, again and again until it is reached or leave()
  // Before bytes are moved through a stripe.
  void at(Instant now) { now_ = now; }
  void on_control_open(Instant now);
  void on_control_bytes(std::span<const std::uint8_t> bytes, Instant now);
  void on_control_lost(const std::string& reason, Instant now);
  // Whoever answered there does not know the secret. Ends it when this peer has not joined yet: who
  // has does not leave for what somebody between may have done.
  void on_stranger_at_master(const std::string& reason, Instant now);
  // `local`: both ends are on one host. `stripe` is an id the shell never uses again.
  // `memory`: it goes through memory.
  void on_dialled(std::uint64_t token, std::uint64_t stripe, bool local, Instant now,
                  bool memory = false);
  void on_dial_failed(std::uint64_t token, const std::string& reason, Instant now);
  // `neighbour`: who is at the other end of the memory; empty for a socket.
  void on_accepted(std::uint64_t stripe, bool local, Instant now, const PeerId& neighbour = {});
  // Its handshake is over.
  [[nodiscard]] bool established(std::uint64_t id) const { return links_.is_established(id); }
  // Null when the stripe is to be closed.
  [[nodiscard]] link::Stripe* stripe(std::uint64_t id) { return links_.stripe(id); }
  // The connection ended, or Stripe::received or resume failed. Other stripes of the link stand in
  // for it where they can. Code::refused: the other end misbehaves, and the link ends.
  void on_stripe_failed(std::uint64_t stripe, const Error& error, Instant now);
  void on_stripe_failed(std::uint64_t stripe, const std::string& reason, Instant now) {
    on_stripe_failed(stripe, Error{Code::unreachable, reason, {}, {}}, now);
  }
  // Neighbours, peers of this host: node::NeighbourEvents. on_offered also from inside
  // LocalityOptions::poll.
  void on_neighbour_up(const PeerId& peer, Instant now);
  void on_neighbour_down(const PeerId& peer, const std::string& reason, Instant now);
  void on_neighbour_offer(const PeerId& peer, memory::Offer what, std::uint64_t number,
                          const memory::RegionPtr& region, Instant now);
  // The collective in memory moves on; whoever drives the loop calls it again as it says.
  [[nodiscard]] Pace step(Instant now);
  [[nodiscard]] bool shares_memory() const { return locality_.group().is_open(); }
  [[nodiscard]] bool has_actions() const {
    return locality_.has_actions() || actions_.calls_ended || calls_.has_reports() ||
           links_.has_flush();
  }
  void on_time(Instant now);
  [[nodiscard]] Instant next_deadline() const;
  [[nodiscard]] EngineActions take_actions();

  // -- the user's calls
  // This peer's next call is a collective one; until it is a member, it waits to be let in.
  void request_admission(Instant now);
  // It gave up waiting; unless it was let in a moment ago.
  void withdraw_admission(Instant now);
  [[nodiscard]] CallPtr enter(wire::RoundKind kind, Instant now,
                              wire::RoundPayload payload = wire::Nothing{});
  // Arrays must stay valid until the call is done. Ends at once when the world is one (or with an
  // error).
  [[nodiscard]] CallPtr start_operation(OperationRequest request, Instant now);
  // Makes the state equal on all members. Its memory must stay valid until the call is done. One at
  // a time.
  [[nodiscard]] CallPtr start_sync(SyncRequest request, Instant now);
  // What a receiver would get in the place of what cannot be written, or of nothing: can it?
  [[nodiscard]] std::vector<wire::StateEntry> take_question(const CallPtr& call);
  // The answer. An error puts this peer out of the run, with that sentence.
  void answer(const CallPtr& call, const Error& error, Instant now);
  // Measures the ways between members, some three seconds, and has the master plan with that. One
  // at a time.
  [[nodiscard]] CallPtr start_optimize(Instant now);
  // Ends the next round of that kind for all members, instead of entering it.
  [[nodiscard]] CallPtr give_up(wire::RoundKind kind, Code code, Instant now);
  // This peer was let in by a sync that goes on: its own begins after the admission.
  [[nodiscard]] bool owes_sync() const { return owes_sync_; }
  // The caller gives up: the call still ends by the master's verdict, or a second from now by
  // leaving the run.
  void abort(const CallPtr& call, Code code, Instant now);
  void leave(const std::string& reason, Instant now);
  // Something broke that nobody planned for (no memory): this peer is out.
  void fail(const std::string& what);

  // Level 2's admission point asks the master only when newcomers wait (or links are to be
  // measured: a commit says the same of both) or nobody knows. Replicas
  // always ask: the ranks of one are to pass as many points.
  [[nodiscard]] bool admission_round_needed() const {
    return !newcomers_wait_.has_value() || *newcomers_wait_ ||
           (record() != nullptr && record()->ranks_per_replica > 0);
  }
  void pass_admission_point() { newcomers_wait_.reset(); }
  [[nodiscard]] bool optimizing() const { return optimizing_.has_value(); }
  // No collective call yet since this peer was let in; `use_fresh` is that call.
  [[nodiscard]] bool fresh() const { return fresh_; }
  void use_fresh() { fresh_ = false; }

  // The caller's threads, for the stuck rule.
  [[nodiscard]] Threads& threads() { return threads_; }

  // -- what the peer knows
  [[nodiscard]] Standing standing() const;
  [[nodiscard]] const Error& end() const { return end_; }  // REQUIRES: standing() == out
  [[nodiscard]] const Record& record() const { return session_.record(); }
  // The epoch that let this peer in: what its callers know first, as all others know it after the
  // admission point. REQUIRES: this peer is, or was, a member.
  [[nodiscard]] const Record& admitted() const { return admitted_; }
  [[nodiscard]] const PeerId& id() const { return session_.id(); }
  [[nodiscard]] std::uint32_t waiting_for() const { return waiting_for_; }
  // Attempts to reach the master for the first time that failed, and why the last one did.
  [[nodiscard]] std::uint32_t join_failures() const { return master_link_.failures(); }
  [[nodiscard]] std::uint64_t run() const { return session_.run(); }  // 0: not known yet
  [[nodiscard]] const std::string& control_failure() const { return master_link_.failure(); }
  // Sizes over all groups, as of the latest epoch or outcome.
  [[nodiscard]] const wire::Census& census() const { return census_; }
  [[nodiscard]] std::size_t unfinished() const { return calls_.unfinished(); }
  [[nodiscard]] std::vector<CallPtr> operation_calls() const;
  // Its end is still to come, or to be confirmed by the master.
  [[nodiscard]] bool awaits(const wire::CallKey& key) const { return calls_.awaits(key); }
  [[nodiscard]] const CallTable& calls() const { return calls_; }
  // Connections that ended and others of their link stood in for; frames that went again for it.
  [[nodiscard]] std::uint64_t stand_ins() const { return links_.stand_ins(); }
  [[nodiscard]] std::uint64_t sent_again() const { return links_.sent_again(); }
  [[nodiscard]] const link::LinkTable& links() const { return links_; }
  [[nodiscard]] const Session& session() const { return session_; }

 private:
  struct Sync {
    CallPtr call;
    SyncRequest request;
    state::SyncId id;
    std::uint32_t tries = 0;
    std::optional<std::vector<wire::StateEntry>> question;  // not taken yet
    bool unanswered = false;
    bool complete = false;       // only the answer is missing
    std::uint64_t tx_bytes = 0;  // of tries that came to nothing
    std::uint64_t rx_bytes = 0;
  };
  struct Optimizing {
    CallPtr call;
    enum class Phase : std::uint8_t { meeting, measuring, telling };
    Phase phase = Phase::meeting;
    std::set<PeerId> probed;  // links to these are kept until all are through
    [[nodiscard]] const wire::RoundKey& key() const { return std::get<wire::RoundKey>(call->key); }
  };
  // -- what the master says
  void hear(const SessionEvent& event);
  void on_welcome(const Welcomed& welcomed);
  void on_epoch(const Record& record);
  void begin_admission(const Record& record);
  void end_attempts(const Record& record);
  void on_verdict(const wire::Verdict& verdict);
  void on_outcome(const wire::Outcome& outcome);
  void on_prepare(const wire::Prepare& prepare);
  void on_expect(const wire::Expect& expect);
  void on_try(const wire::Try& question);
  void on_relay(const wire::Relay& relay);
  // -- what the parts tell. Called after every use of theirs that may.
  void locality_told();
  void executor_told();
  void transfer_told();
  void on_local_commit(const LocalCommit& commit);
  [[nodiscard]] bool was_called(const wire::OpKey& key) const;
  void transfer_planned();
  void transfer_over(Code code, const std::string& reason);

  // link::Traffic
  link::Placement place(link::Stripe& from, const link::FrameHeader& header) override;
  Status arrived(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token,
                 Buffer buffer) override;
  void voided(link::Stripe& from, const link::FrameHeader& header, std::uint64_t token) override;
  void drained(link::Stripe& from, const link::FrameHeader& header) override;
  void interrupted(link::Stripe& from, const link::FrameHeader& header,
                   std::uint64_t token) override;
  Status control(link::Stripe& from, const link::FrameHeader& header,
                 std::span<const std::uint8_t> payload) override;
  bool next(link::Stripe& to, link::OutgoingFrame& frame) override;

  // -- links
  [[nodiscard]] link::LinkContext link_context() const;
  [[nodiscard]] std::map<PeerId, link::LinkTarget> link_targets() const;
  void choose_links();
  void choose_neighbours();
  void dial_pipes();
  // Handles what the links have told. After every call of theirs.
  void links_told();
  void on_link_up(const PeerId& peer);
  void on_link_down(const link::LinkDown& down);
  void on_link_failed(const link::LinkFailed& failed);
  void check_prepared();
  void count_for_prober(const link::Stripe& from);
  void watch_rates();
  void on_pong(const PeerId& peer, const link::FrameHeader& header);
  void tell_rates();

  // -- calls
  void enter_sync(wire::RoundKind kind, wire::RoundPayload payload);
  bool move_sync_to(wire::RoundKind kind);
  void begin_sync();
  void on_sync_outcome(const wire::Outcome& outcome, const Error& error);
  std::unique_ptr<state::Update> end_transfer();
  void end_sync(Error error, const Record& record);
  std::optional<Decision> move_round_to(const CallPtr& call, const wire::RoundKey& next);
  void enter_round(const CallPtr& call, const wire::RoundKey& key, wire::RoundPayload payload);
  void enter_optimize(const wire::RoundKey& key, wire::RoundPayload payload);
  void on_optimize_outcome(const Error& error);
  void begin_measuring();
  [[nodiscard]] bool measuring() const {
    return optimizing_ && optimizing_->phase == Optimizing::Phase::measuring;
  }
  void tell_measurements();
  void end_optimize(Error error, const Record& record);
  [[nodiscard]] std::optional<Error> misfit_of(const CallEntry& operation) const;
  void run_attempt(const wire::OpKey& key);
  void run_on_network(const wire::OpKey& key);
  void stop_attempt(const wire::OpKey& key);
  void request_abort(const wire::CallKey& key, Code code, const PeerId& lost = {});
  void report_entered(Instant now, bool all);
  void end_call(Call& call, Error error, const Record& record);
  void end_operation(const wire::OpKey& key, Error error, const Record& record);
  void die(Error error);
  void fail_for_all(const wire::OpKey& key, const Error& error);
  // It runs in memory, and the master was not told of this attempt.
  [[nodiscard]] bool in_memory_alone(const wire::CallKey& key) const;
  void report_blocked(Instant now);
  void tell_changes();
  void log(LogLevel level, std::string text) { actions_.log.emplace_back(level, std::move(text)); }

  EngineOptions options_;
  Session session_;
  MasterLink master_link_;
  link::LinkTable links_;
  collective::Executor executor_;
  state::Transfer transfer_;
  Locality locality_;
  EngineActions actions_;
  Instant now_{};
  Instant last_tick_{};
  Instant next_tick_{};

  // the run
  wire::Census census_;
  std::uint32_t waiting_for_ = 0;
  bool asked_ = false;      // waits to be let in
  bool requested_ = false;  // ... because its first collective call said so
  bool out_ = false;
  Error end_;

  // links
  std::uint64_t joined_ = 0;        // our join ordinal
  std::uint64_t member_since_ = 0;  // epoch that let this peer in
  Record admitted_;                 // that epoch's record
  std::uint64_t worked_since_ = 0;  // admission of its first committed operation; 0: none yet
  std::optional<wire::Prepare> prepare_;
  std::uint64_t prepared_epoch_ = 0;
  std::vector<PeerId> prepared_without_;
  std::vector<wire::Member> expected_;

  // calls
  CallTable calls_;
  std::optional<Sync> sync_;
  std::optional<Optimizing> optimizing_;
  measured::Prober prober_;
  measured::LiveRates live_rates_;
  Instant rates_looked_{};
  Instant next_pings_{};
  bool rates_busy_ = false;
  bool owes_sync_ = false;
  // Whether newcomers waited at a commit since the last admission point; nothing: there was none.
  std::optional<bool> newcomers_wait_;
  bool fresh_ = false;
  bool was_member_ = false;
  MembershipNews news_;
  Threads threads_;
  std::uint64_t plan_hash_ = 0;  // of this epoch
  Instant next_heartbeat_{};
  Instant next_blocked_{};
  std::uint64_t moved_at_blocked_ = 0;
};

}  // namespace pccl::peer
