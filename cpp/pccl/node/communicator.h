// The calls of a user, for the bindings: they block, obey deadlines and Ctrl-C, and may come from
// any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pccl/node/runtime.h"

namespace pccl::node {

struct CommunicatorOptions {
  wire::Address master;
  std::uint32_t group = 0;
  Settings settings;
  std::uint16_t port = 0;
  std::vector<wire::Address> advertise;
  std::string replica;  // with its other peers, one in each group, it comes and goes; empty: none
  std::uint32_t ranks_per_replica = 0;
  io::Secret secret;  // the run's; none: nothing is encrypted
  // The calling thread, as the caller's language numbers it, and whether such a thread has ended.
  // Called from the calling thread, without any lock. Empty: threads are those of the system.
  std::function<std::uint64_t()> thread;
  std::function<bool(std::uint64_t thread)> ended;
};

// What ends a call before its work does.
struct Limit {
  std::optional<Duration> timeout;
  // Asked every 100 ms or so while the call is blocked, from the calling thread, without any lock:
  // true ends the call as interrupted. May call the communicator. May be empty.
  std::function<bool()> interrupted;
};

// Told every 100 ms or so, like Limit::interrupted: bytes received, and to be received.
using Progress = std::function<void(std::uint64_t, std::uint64_t)>;

// Asked once what is to be received is known, from the calling thread, without any lock: can these
// entries be taken over here, in the place of what cannot be written or of nothing? An error puts
// this peer out of the run; nothing means that the call is interrupted.
using StateCheck = std::function<std::optional<Error>(const std::vector<wire::StateEntry>&)>;

struct JoinRequest {
  std::uint32_t min_peers = 1;
  unsigned attempts = 1;  // to reach the master, a second apart
  bool enter =
      true;  // come back as a member; else already when the group turns out to have started before
};

// Who reduces together, as of this communicator's latest call.
struct View {
  peer::Record record;  // null: no member yet
  wire::Census census;
};

// One peer. *any thread*. After a fork the child's copy answers invalid_usage to everything.
class Communicator {
 public:
  explicit Communicator(CommunicatorOptions options);
  ~Communicator();  // close()
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // -- calls that block. A deadline or Ctrl-C asks the master to end the call for everybody; what
  // it says within a second is the result.

  // Once.
  Status join(const JoinRequest& request, const Limit& limit);
  // Level 2's admission point; first completes this peer's own operations. True when members were
  // added.
  [[nodiscard]] Result<bool> admit(const Limit& limit);
  // Level 1's: pending_operations while there are unfinished ones.
  Status update_topology(const Limit& limit);
  [[nodiscard]] Result<bool> peers_pending(const Limit& limit);
  Status barrier(const Limit& limit);
  // Measures the network and has the master plan with that. pending_operations while there are
  // unfinished ones.
  Status optimize(const Limit& limit);
  // Makes the state equal on all members. When it returns, entries that can be written have their
  // new bytes (or all have their old ones), and the call's update has what else changed: also when
  // the caller was interrupted too late. Level 2 (vote.owned) first lets newcomers in.
  [[nodiscard]] Result<peer::CallPtr> sync(std::vector<state::LocalEntry> entries,
                                           wire::SyncVote vote, const Progress& progress,
                                           const StateCheck& check, const Limit& limit);
  // What the latest sync has changed here is where it belongs. Without this, a peer that received
  // something takes part in the next sync as a newcomer.
  void took_over() { whole_ = true; }
  // Blocks only a newcomer, until it is let in. The request's arrays must stay valid until the call
  // is done. invalid_usage: another thread makes the calls without a tag.
  [[nodiscard]] Result<peer::CallPtr> start(peer::OperationRequest request, const Limit& limit);
  // The verdict. May be called again.
  Status wait(const peer::CallPtr& call, const Limit& limit);

  // Both in one, with one deadline. `started` is told the call before it is waited for: its arrays
  // are in use until it is done, however this ends.
  Status reduce(peer::OperationRequest request, const Limit& limit,
                const std::function<void(const peer::CallPtr&)>& started);

  // Leaves the run: the others see a departure, not a loss. Other threads' calls end. Takes a
  // second at most. `failure`: why this peer is gone before its work was done; its replica goes
  // with it at once.
  void close(const std::string& failure = {});

  // -- calls that do not block
  [[nodiscard]] Result<View> view();
  // The newest epoch that is known here, which no call may have seen yet; null: no member yet.
  [[nodiscard]] Result<peer::Record> newest();
  [[nodiscard]] std::size_t unfinished();
  // Joined, and neither closed, evicted nor cut off.
  [[nodiscard]] bool is_open();
  [[nodiscard]] const PeerId& id() const { return id_; }
  [[nodiscard]] std::uint32_t group() const { return options_.group; }
  // A copy that a fork made.
  [[nodiscard]] bool inert() const;

 private:
  class Visit;
  using Deadline = std::optional<Instant>;

  [[nodiscard]] Result<std::shared_ptr<Runtime>> runtime();
  // REQUIRES, for what follows: the turn.
  Status await_call(Visit& visit, const peer::CallPtr& call, const Deadline& deadline,
                    const Limit& limit, bool give_up, const std::function<void()>& reply = {});
  void give_up(Visit& visit, wire::RoundKind kind, Code code);
  Status await_standing(Visit& visit, const std::function<bool()>& done, const Deadline& deadline,
                        const Limit& limit, const std::function<void()>& remind);
  Status finish_own(Visit& visit, const Deadline& deadline, const Limit& limit);
  Status become_member(Visit& visit, const Deadline& deadline, const Limit& limit);
  [[nodiscard]] Result<peer::CallPtr> round(Visit& visit, wire::RoundKind kind,
                                            const Deadline& deadline, const Limit& limit);
  [[nodiscard]] Result<peer::CallPtr> admission_point(
      Visit& visit, wire::RoundKind kind, const Deadline& deadline, const Limit& limit,
      const std::function<void(Code)>& gave_up = {});
  [[nodiscard]] Result<peer::CallPtr> begin(Visit& visit, peer::OperationRequest request,
                                            const Deadline& deadline, const Limit& limit);
  // The thread whose calls meet by their order.
  struct Owner {
    std::uint64_t thread = 0;                 // 0: none yet
    std::weak_ptr<const std::uint64_t> life;  // ends with the thread
    std::uint64_t caller = 0;                 // CommunicatorOptions::thread
  };
  [[nodiscard]] Status claim_order(const peer::OperationRequest& request);
  void look(peer::Engine& engine, const peer::Record& record);
  void see(const peer::Record& record);  // REQUIRES: mutex_

  CommunicatorOptions options_;
  const PeerId id_ = PeerId::random();
  const std::uint64_t generation_;  // of forks
  std::atomic<bool> closed_{false};
  std::atomic<bool> joined_{false};
  std::atomic<bool> whole_{true};
  std::mutex mutex_;  // guards what follows; never held in a blocking call
  std::shared_ptr<Runtime> runtime_;
  View view_;
  Owner owner_;
};

}  // namespace pccl::node
