// The engine of one peer: the session with the master, the links to other peers, the operations
// over them, and the calls of the user. Pure: a shell (node/runtime.cpp, or the simulator) brings
// events and carries out actions.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/buffer.h"
#include "pccl/base/parallel.h"
#include "pccl/base/settings.h"
#include "pccl/peer/control_connection.h"
#include "pccl/peer/link_driver.h"
#include "pccl/peer/news.h"
#include "pccl/peer/threads.h"

namespace pccl::peer {

struct EngineOptions {
  JoinOptions join;
  Settings settings;
  LocalityOptions locality;
  // Limits of bytes sent without a grant (collective::ExecutorOptions), equal on all peers. Tests
  // use less.
  std::uint32_t eager_bytes = 64 << 10;
  std::uint64_t eager_room = 1 << 20;
  // For links to other hosts, if the settings name no number of stripes.
  link::StripeTuner::Options stripes;
  std::uint32_t stripe_budget = 256;  // over all such links
  std::uint32_t local_stripes = 1;    // of a link on one host, if the settings name no number
  bool encrypted = false;             // bytes that leave this process need no checksums
  bool trace = false;                 // EngineActions::trace is filled
  // Runs the parts of work on memory in parallel. Null: one part after the other.
  Parallel* parallel = nullptr;
  // The most bytes sent to each peer to measure the link to it.
  std::uint64_t probe_bytes = std::uint64_t{1} << 40;
};

// Where the peer stands in the run.
enum class Standing {
  joining,   // the master has not answered yet, or the peer waits for admission
  newcomer,  // joined; a member from its first collective call on
  member,
  out,  // closed, evicted or cut off: `Engine::end()` has the reason
};

// *one thread at a time: the one that drives the loop*
class Engine {
 public:
  Engine(const EngineOptions& options, std::shared_ptr<BufferPool> pool);

  // -- events
  void start(Instant now);  // dials the master until it is reached or leave() is called
  // Sets the time. Call before bytes are moved through a stripe.
  void at(Instant now) { now_ = now; }
  void on_control_open(Instant now);
  void on_control_bytes(std::span<const std::uint8_t> bytes, Instant now);
  void on_control_lost(const std::string& reason, Instant now);
  // The other end of the control connection does not know the secret. Ends a peer that has not
  // joined yet; a peer that has joined dials again, since an attacker on the path can cause this.
  void on_stranger_at_master(const std::string& reason, Instant now);
  // The part for events of connections and of neighbours.
  [[nodiscard]] LinkDriver& connections(Instant now) {
    at(now);
    return link_driver_;
  }
  // Null when the stripe is to be closed.
  [[nodiscard]] link::Stripe* stripe(std::uint64_t id) { return links_.stripe(id); }
  // Combines what has arrived on one stripe or several, and reads what neighbours have located.
  // take_actions() does it, too: a shell calls this when bytes are fresh in the cache.
  void combine();
  // Advances the collective in memory. The pace tells the driver of the loop when to call again.
  [[nodiscard]] Pace step(Instant now);
  [[nodiscard]] bool has_actions() const;
  void on_time(Instant now);
  [[nodiscard]] Instant next_deadline() const;
  [[nodiscard]] EngineActions take_actions();

  // -- the user's calls
  // The user gave up waiting. Does nothing if this peer was admitted meanwhile.
  void withdraw_admission(Instant now);
  [[nodiscard]] CallPtr enter(wire::RoundKind kind, Instant now,
                              wire::RoundPayload payload = wire::Nothing{});
  // Arrays must stay valid until the call is done. Ends at once in a group of one, or with an
  // error.
  [[nodiscard]] CallPtr start_operation(OperationRequest request, Instant now);
  // Makes the state equal on all members. Its memory must stay valid until the call is done. One at
  // a time.
  [[nodiscard]] CallPtr start_sync(SyncRequest request, Instant now);
  // Returns the entries that the receiver must create or replace; reply with answer(). Empty: there
  // is no question.
  [[nodiscard]] std::vector<wire::StateEntry> take_question(const CallPtr& call) {
    return sync_.take_question(call);
  }
  // An error ends this receiver's part in the sync, and the master removes it with that reason.
  void answer(const CallPtr& call, const Error& error, Instant now);
  // Measures the links between members for about three seconds, and the master plans with the
  // result. One at a time.
  [[nodiscard]] CallPtr start_optimize(Instant now);
  // The user's next operation comes at about that time. Links get ready for it until it starts.
  void expect_operation(Instant at, const measured::Announcement& announced, Instant now);
  // Ends the next round of that kind for all members, instead of entering it.
  [[nodiscard]] CallPtr decline_round(wire::RoundKind kind, Code code, Instant now);
  // The caller gives up. The call still ends by the master's verdict; if none arrives within a
  // second, this peer leaves the run.
  void give_up(const CallPtr& call, Code code, Instant now);
  // This peer will leave at its next admission point. The master is told.
  void drain(Instant now);
  // For all calls from now on.
  void wait_no_longer_than(const wire::Patience& patience, Instant now);
  void leave(const std::string& reason, Instant now);
  // An unhandled failure, such as no memory: this peer leaves the run.
  void fail(const std::string& what);

  // -- state
  [[nodiscard]] Standing standing() const;
  [[nodiscard]] const Error& end() const { return *end_; }  // REQUIRES: standing() == out
  // Sizes over all groups, as of the latest epoch or outcome.
  [[nodiscard]] const wire::Census& census() const { return census_; }
  // This peer was asked to leave at its next admission point.
  [[nodiscard]] bool draining() const { return draining_; }
  // Several masters: this member has lost the one that it followed, and another one may take over.
  // Nobody hears what it says meanwhile.
  [[nodiscard]] bool between_masters() const {
    return !out() && options_.join.masters > 1 && session_.member() && !session_.welcomed() &&
           session_.record()->members.size() > 1;
  }

  // -- parts
  [[nodiscard]] Admission& admission() { return admission_; }
  [[nodiscard]] Threads& threads() { return threads_; }
  [[nodiscard]] const CallTable& calls() const { return calls_.table(); }
  [[nodiscard]] const Totals& totals() const { return calls_.totals(); }
  [[nodiscard]] const link::LinkTable& links() const { return links_; }
  [[nodiscard]] const Locality& locality() const { return locality_; }
  [[nodiscard]] const Measuring& measuring() const { return measuring_; }
  [[nodiscard]] const Session& session() const { return session_; }
  [[nodiscard]] const MembershipNews& news() const { return news_; }
  [[nodiscard]] const ControlConnection& control() const { return control_; }

 private:
  // -- messages from the master
  void hear(const SessionEvent& event);
  void on_welcome(const Welcomed& welcomed);
  void leave_master();
  void on_epoch(const Record& record);
  void begin_admission(const Record& record);
  void on_outcome(const wire::Outcome& outcome);

  [[nodiscard]] bool out() const { return end_.has_value(); }
  [[nodiscard]] CallPtr begin_call(Instant now);
  void end_all(const Error& error, const Record& record);
  void die(Error error);
  [[nodiscard]] bool check_given_up();
  [[nodiscard]] bool check_control();
  void on_tick();
  void say_heartbeat();
  void report_blocked();
  void tell_news();

  EngineOptions options_;
  Serial serial_;
  Instant now_{};  // of the event that is being handled
  EngineActions actions_;
  Tracer tracer_;
  Session session_;
  ControlConnection control_;
  std::uint32_t strangers_ = 0;  // masters in a row with another secret
  CallDriver calls_;
  Admission admission_;
  LinkDriver link_driver_;  // before links_, which refers to it
  link::LinkTable links_;
  Locality locality_;
  Operations operations_;
  SyncCall sync_;
  Measuring measuring_;
  Threads threads_;
  MembershipNews news_;

  std::optional<Error> end_;  // set: this peer is out of the run
  wire::Census census_;
  bool draining_ = false;
  wire::Patience patience_;
  Instant last_time_{};
  Instant next_tick_{};
  Instant next_heartbeat_{};
  Instant next_blocked_{};
  std::uint64_t moved_at_blocked_ = 0;
};

}  // namespace pccl::peer
