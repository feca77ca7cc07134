// Whole runs in one thread from a seed: one master, some peers, user programs, a fake network and
// its faults. Real reductions; the invariants of the engine are checked after every event.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace pccl::simulation {

// What the peers' users do.
enum class Program : std::uint8_t {
  level1,    // update_topology, all_reduce without re-run, again on failure
  level2,    // admit, operations that re-run, several in flight, tags, barriers
  threads,   // a reduce thread beside the main thread, long and uneven computing
  mismatch,  // as level2, but now and then one member's call differs
  stuck,     // as level2, but now and then members wait in calls that cannot meet
  sync,      // sync, then operations that re-run; the state says where the loop stands
};
inline constexpr unsigned kPrograms = 6;

// A mistake made on purpose, to see that the checks notice.
enum class Bug : std::uint8_t {
  none,
  flip_result,    // a bit of one member's committed result
  other_verdict,  // one member is told of a loss where the others are told commit
  touch_input,    // an in-place input is written while the operation runs
  lose_report,    // a member's reports of finished operations do not reach the master
  forget_entry,   // a rebuilt master is not told of an open operation
  stale_state,    // a receiver keeps its old state though the sync has succeeded
  commit_alone,   // a member counts as having called differently, and the commit comes all the same
  lose_left_out,  // a member forgets what rounding left out of one element
  skip_call,      // a member counts as being one call behind, and the commit comes all the same
};
inline constexpr unsigned kBugs = 10;

struct Options {
  Program program = Program::level2;
  std::uint32_t peers = 3;  // present from the start
  std::uint32_t joins = 1;  // later, at random moments
  std::uint32_t steps = 4;  // of each program
  std::uint32_t max_elements = 200;
  bool everything_small = true;  // thresholds scaled down, so that tiny arrays use every schedule
  // How many of each fault, at random moments.
  std::uint32_t kills = 0;
  std::uint32_t freezes = 0;      // half of them for good
  std::uint32_t partitions = 0;   // one way or both, between two peers or a peer and the master
  std::uint32_t cuts = 0;         // of a connection; now and then one end never hears of it
  std::uint32_t stalls = 0;       // a connection moves nothing for a while
  std::uint32_t corruptions = 0;  // a byte of a data frame
  std::uint32_t leaves = 0;
  std::uint32_t aborts = 0;    // a caller's deadline or Ctrl-C
  std::uint32_t restarts = 0;  // of the master, without memory
  std::uint32_t master_stalls = 0;
  std::uint32_t machines = 0;  // on which peers share memory; 0: they share none
  // Peers of each replica, one in each group; `peers` and `joins` count replicas then. 0: none.
  std::uint32_t ranks = 0;
  // How many of a hundred peers (or machines) nobody can dial from outside.
  std::uint32_t hidden = 0;
  std::uint32_t relays = 0;  // 1: the master relays where nothing else helps
  Bug bug = Bug::none;
  bool trace = false;  // keep a line per event

  // Everything chosen by the seed.
  [[nodiscard]] static Options draw(std::uint64_t seed);
  [[nodiscard]] std::string describe() const;
};

struct Report {
  std::uint64_t events = 0;
  std::uint64_t commits = 0;  // operations committed, counted once per member
  std::uint64_t aborts = 0;   // operations that ended otherwise, counted the same
  std::uint64_t reruns = 0;   // attempts beyond the first
  std::uint64_t epochs = 0;   // highest epoch
  std::uint64_t faults = 0;
  std::uint64_t kills = 0;
  std::uint64_t joins = 0;
  std::uint64_t evictions = 0;  // peers that were put out, or cut off
  std::uint64_t restarts = 0;
  std::uint64_t rebuilds = 0;    // of a shadow master, compared with the live one
  std::uint64_t deadlocks = 0;   // calls that ended in deadlock
  std::uint64_t mismatches = 0;  // calls that ended in mismatched_call
  std::uint64_t syncs = 0;       // that succeeded, counted once per member
  std::uint64_t sync_failures = 0;
  std::uint64_t sync_bytes = 0;  // of state, received
  std::uint64_t checksum_drops = 0;
  std::uint64_t stand_ins = 0;   // connections that ended, and others of their link stood in for
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
