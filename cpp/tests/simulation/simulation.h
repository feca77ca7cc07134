// Simulates whole runs in one thread from a seed: a master, peers, user programs, a network and its
// faults. Reductions are real. The invariants of the engine are checked after every event.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pccl::simulation {

// The programs of the peers' users.
enum class Program : std::uint8_t {
  explicit_api,  // update_topology, all_reduce without re-run, repeated on failure
  simple_api,    // admit, operations that re-run, several in flight, tags, barriers
  threads,       // a reduce thread beside the main thread, long and uneven computing
  mismatch,      // as simple_api, but sometimes one member's call differs
  stuck,         // as simple_api, but sometimes members wait in calls that cannot meet
  sync,          // sync, then operations that re-run; the state contains the loop's step
};
inline constexpr unsigned kPrograms = 6;

// A deliberate bug, to test the checks.
enum class Bug : std::uint8_t {
  none,
  flip_result,    // a bit of one member's committed result
  other_verdict,  // one member receives a loss where the others receive a commit
  touch_input,    // an in-place input is written while the operation runs
  lose_report,    // a member's reports of finished operations do not reach the master
  forget_entry,   // a rebuilt master does not receive an open operation
  stale_state,    // a receiver keeps its old state although the sync has succeeded
  commit_alone,   // an operation is committed although a member counts as having called differently
  lose_left_out,  // a member loses the rounding error of one element
  skip_call,      // an operation is committed although a member counts as being one call behind
  forge_accept,   // a master takes its proposal of an epoch as accepted by whom it sends it to
  hide_accept,    // members do not tell a new master which epoch they have accepted
  split_commit,   // an operation counts as committed for one member alone
};
inline constexpr unsigned kBugs = 13;

// Floating-point elements that are averaged are multiples of a number which 1 to 12 divide, so that
// averages are whole numbers. The sums of 12 members are exact in float32.
inline constexpr std::uint32_t kMostMembers = 12;
inline constexpr std::int32_t kDivisible = 27720;

struct Options {
  Program program = Program::simple_api;
  std::uint32_t peers = 3;  // present from the start
  std::uint32_t joins = 1;  // later, at random moments
  std::uint32_t steps = 4;  // of each program
  std::uint32_t max_elements = 200;
  bool everything_small = true;  // small thresholds, so that tiny arrays use every schedule
  // The number of faults of each kind, at random times.
  std::uint32_t kills = 0;
  std::uint32_t freezes = 0;      // half of them permanent
  std::uint32_t partitions = 0;   // one way or both, between two peers or a peer and the master
  std::uint32_t cuts = 0;         // of a connection; sometimes one end never notices
  std::uint32_t stalls = 0;       // a connection moves nothing for a while
  std::uint32_t corruptions = 0;  // a byte of a data frame
  std::uint32_t leaves = 0;
  std::uint32_t aborts = 0;    // a caller's deadline or Ctrl-C
  std::uint32_t restarts = 0;  // of the master, without memory
  std::uint32_t master_stalls = 0;
  std::uint32_t masters = 1;
  std::uint32_t splits = 0;  // several masters: peers and masters are cut into two halves
  // Several masters: one that serves nothing is told, by a peer that goes on with it, that there is
  // an epoch of that peer alone.
  std::uint32_t lies = 0;
  std::uint32_t machines = 0;  // on which peers share memory; 0: they share none
  // Peers of each replica, one in each group; `peers` and `joins` count replicas then. 0: none.
  std::uint32_t ranks = 0;
  std::uint32_t hidden =
      0;  // percent of peers (or machines) that accept no connection from outside
  std::uint32_t relays = 0;  // 1: the master relays
  // Milliseconds that members wait for those that are late, once 60 % are in a call; 0: for ever.
  std::uint32_t patience = 0;
  Bug bug = Bug::none;
  bool trace = false;  // keep a line per event

  // Options drawn from the seed.
  [[nodiscard]] static Options draw(std::uint64_t seed);
  [[nodiscard]] std::string describe() const;
};

struct Report {
  std::uint64_t events = 0;
  std::uint64_t commits = 0;  // operations committed, counted once per member
  std::uint64_t aborts = 0;   // operations that failed, counted once per member
  std::uint64_t reruns = 0;   // attempts beyond the first
  std::uint64_t epochs = 0;   // highest epoch
  std::uint64_t faults = 0;
  std::uint64_t kills = 0;
  std::uint64_t joins = 0;
  std::uint64_t evictions = 0;  // peers that were removed or cut off
  std::uint64_t restarts = 0;
  std::uint64_t takeovers = 0;    // of groups, by other masters
  std::uint64_t gave_way = 0;     // masters that stepped down for more members of another epoch
  std::uint64_t doubts = 0;       // refusals of masters that the member had not followed
  std::uint64_t master_lost = 0;  // members that were cut off from every master
  std::uint64_t rebuilds = 0;     // of a shadow master, compared with the live one
  std::uint64_t deadlocks = 0;    // calls that ended in deadlock
  std::uint64_t mismatches = 0;   // calls that ended in mismatched_call
  std::uint64_t syncs = 0;        // syncs that succeeded, counted once per member
  std::uint64_t sync_failures = 0;
  std::uint64_t sync_bytes = 0;  // of state, received
  std::uint64_t checksum_drops = 0;
  std::uint64_t stand_ins = 0;   // connections that ended while others of their link took over
  std::uint64_t sent_again = 0;  // frames
  std::uint64_t relayed = 0;     // connections
  double seconds = 0;            // simulated
  std::set<std::pair<std::string, std::string>>
      reached;  // (fault or message, what the peer was doing)
  // How often each row of link::link_transitions() and peer::call_transitions() was taken.
  std::vector<std::uint64_t> link_transitions;
  std::vector<std::uint64_t> call_transitions;
  std::string violation;           // empty: every invariant held
  std::vector<std::string> trace;  // the last lines, or all
};

[[nodiscard]] Report simulate(std::uint64_t seed, const Options& options);

}  // namespace pccl::simulation
