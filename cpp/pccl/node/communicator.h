// A user's calls, for the bindings: they block, obey deadlines and Ctrl-C, and may come from any
// thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pccl/node/runtime.h"

namespace pccl::node {

struct CommunicatorOptions : NodeOptions {
  std::uint32_t group = 0;
  std::string replica;  // its peers, one in each group, join and leave together; empty: none
  std::uint32_t ranks_per_replica = 0;
  std::string name;    // wire::Member::name; empty: Settings::name, or else default_name()
  bool quiet = false;  // JoinOptions::quiet; also logs no waits
  // The calling thread's number in the caller's language, and whether the thread with a number has
  // ended. Called from the calling thread, without any lock. Empty: the system's threads count.
  std::function<std::uint64_t()> thread;
  std::function<bool(std::uint64_t thread)> ended;
};

// Limits of a blocking call.
struct Limit {
  std::optional<Duration> timeout;
  // Called about every 100 ms while the call is blocked, from the calling thread, without any lock:
  // true ends the call as interrupted. May call the communicator. May be empty.
  std::function<bool()> interrupted;
};

// Called like Limit::interrupted, with the bytes received, and to be received.
using Progress = std::function<void(std::uint64_t, std::uint64_t)>;

// Called once it is known what will be received, from the calling thread, without any lock: whether
// this peer can create or replace these entries. An error puts this peer out of the run; nullopt
// ends the call as interrupted.
using StateCheck = std::function<std::optional<Error>(const std::vector<wire::StateEntry>&)>;

struct JoinRequest {
  std::uint32_t min_peers = 1;
  unsigned attempts = 1;  // to reach the master, a second apart
  // join() returns when this peer is a member. False: also as a newcomer of a group that has
  // started.
  bool enter = true;
};

// The membership, as of this communicator's latest call.
struct View {
  peer::Record record;  // null: no member yet
  wire::Census census;
};

// The statistics of this peer since it joined.
struct Statistics {
  peer::Totals totals;
  std::uint64_t joined = 0;                             // peers that were let in
  std::uint64_t lost = 0;                               // members
  std::deque<wire::Departure> departures;               // the latest, the newest last
  std::vector<std::pair<PeerId, std::size_t>> stripes;  // connections of each link that is up
};

class Visit;
struct Until;

// One peer. *any thread*. After a fork the child's copy answers invalid_usage to everything.
class Communicator {
 public:
  explicit Communicator(CommunicatorOptions options);
  ~Communicator();  // close()
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // -- calls that block. A deadline or Ctrl-C asks the master to end the call for all members; its
  // verdict is the result.

  // Call once.
  Status join(const JoinRequest& request, const Limit& limit);
  // The admission point of the simple API. First completes this peer's own operations. True when
  // members were added.
  [[nodiscard]] Result<bool> admit(const Limit& limit);
  // Waits for the operations that this peer has started. A deadline or Ctrl-C ends the remaining
  // ones for all members.
  Status settle(const Limit& limit);
  // The admission point of the explicit API. pending_operations: some are unfinished.
  Status update_topology(const Limit& limit);
  [[nodiscard]] Result<bool> peers_pending(const Limit& limit);
  Status barrier(const Limit& limit);
  // Measures the network, and has the master plan with the result. pending_operations: some are
  // unfinished.
  Status optimize(const Limit& limit);
  struct SyncOptions {
    bool lets_in = true;  // the simple API (vote.owned) first lets newcomers in; all members agree
    bool overwrite = false;  // what is received goes straight to writable entries
  };
  // Makes the state equal on all members. On success, writable entries have their new bytes, and
  // the call's update has the other changes; on failure, all entries have their old bytes, or after
  // `overwrite` a mixture. An interruption that comes too late is ignored.
  [[nodiscard]] Result<peer::CallPtr> sync(std::vector<state::LocalEntry> entries,
                                           wire::SyncVote vote, const Progress& progress,
                                           const StateCheck& check, const Limit& limit,
                                           const SyncOptions& options);
  // The latest sync has failed and overwritten a part of the state.
  [[nodiscard]] bool overwrote() const { return overwrote_; }
  // The caller has applied all changes of the latest sync. Without this, a peer that received
  // something takes part in the next sync as a newcomer.
  void took_over() { whole_ = true; }
  // Blocks only a newcomer, until it is let in. The request's arrays must stay valid until the call
  // is done. invalid_usage: another thread makes the calls without a tag.
  [[nodiscard]] Result<peer::CallPtr> start(peer::OperationRequest request, const Limit& limit);
  // The verdict. May be called again.
  Status wait(const peer::CallPtr& call, const Limit& limit);

  // start and wait, with one deadline. Calls `started` before it waits: the arrays are in use until
  // the call is done, however this function ends.
  Status reduce(peer::OperationRequest request, const Limit& limit,
                const std::function<void(const peer::CallPtr&)>& started);

  // Leaves the run: the others see a departure, not a loss. Ends the calls of other threads. Takes
  // at most a second. `failure`: why this peer leaves before its work is done; its replica leaves
  // with it.
  void close(const std::string& failure = {});

  // -- calls that do not block
  [[nodiscard]] Result<View> view();
  // The newest epoch that this peer knows, even if no call has used it; null: no member yet.
  [[nodiscard]] Result<peer::Record> newest();
  // Waits for the turn, as calls do, but for no other peer.
  [[nodiscard]] Result<Statistics> statistics();
  // The epoch of view(); 0: no member yet.
  [[nodiscard]] std::uint64_t seen_epoch();
  [[nodiscard]] std::size_t unfinished();
  // Joined, and not closed, evicted or cut off since.
  [[nodiscard]] bool is_open();
  // Asks this peer to leave at its next admission point.
  void drain();
  [[nodiscard]] bool draining();
  // The next operation of this peer comes in about that time. Waits for the turn, as calls do.
  void expect_operation(Duration in, const measured::Announcement& announced);
  // For all calls from now on. Waits for the turn, as calls do.
  void wait_no_longer_than(const wire::Patience& patience);
  [[nodiscard]] const std::string& name() const { return options_.name; }
  [[nodiscard]] const PeerId& id() const { return id_; }
  [[nodiscard]] std::uint32_t group() const { return options_.group; }
  // This is a forked child's copy.
  [[nodiscard]] bool inert() const;

 private:
  [[nodiscard]] Result<std::shared_ptr<Runtime>> runtime();
  // Runs `body(visit)`, as a member: waits first until this peer is let in.
  template <class Body>
  [[nodiscard]] auto as_member(const Limit& limit, const Body& body)
      -> decltype(body(std::declval<Visit&>()));
  // Waits until the call is done, or for `until`. `give_up`: then the call ends for all members;
  // else only this wait ends. `reply` answers the engine's question about the call.
  Status await_call(Visit& visit, const peer::CallPtr& call, const Until& until, bool give_up,
                    const std::function<void()>& reply = {});
  void await_end(Visit& visit, const peer::CallPtr& call);
  void decline_round(Visit& visit, wire::RoundKind kind, Code code);
  // Runs `use` with the turn, unless this communicator is closed.
  void drop_in(const std::function<void(peer::Engine&)>& use);
  Status await_standing(Visit& visit, const std::function<bool()>& done,
                        const std::function<void()>& remind);
  Status finish_own(Visit& visit);
  Status become_member(Visit& visit);
  [[nodiscard]] Result<peer::CallPtr> round(Visit& visit, wire::RoundKind kind);
  [[nodiscard]] Result<peer::CallPtr> admission_point(
      Visit& visit, wire::RoundKind kind, const std::function<void(Code)>& gave_up = {});
  Status optimize_now(Visit& visit);
  [[nodiscard]] bool alone(Visit& visit);
  [[nodiscard]] Result<peer::CallPtr> begin(Visit& visit, peer::OperationRequest request);
  [[nodiscard]] Status claim_order(const peer::OperationRequest& request);
  void look(peer::Engine& engine, const peer::Record& record);
  void see(const peer::Record& record);  // REQUIRES: mutex_

  // The thread whose calls are matched by their order.
  struct Owner {
    std::uint64_t thread = 0;                 // 0: none yet
    std::weak_ptr<const std::uint64_t> life;  // expires with the thread
    std::uint64_t caller = 0;                 // CommunicatorOptions::thread
  };

  CommunicatorOptions options_;
  const PeerId id_ = PeerId::random();
  const std::uint64_t generation_;  // see fork_generation
  std::atomic<bool> closed_{false};
  std::atomic<bool> joined_{false};
  std::atomic<bool> whole_{true};
  std::atomic<bool> overwrote_{false};
  std::mutex mutex_;  // guards what follows; never held in a blocking call
  std::shared_ptr<Runtime> runtime_;
  View view_;
  Owner owner_;
};

}  // namespace pccl::node
