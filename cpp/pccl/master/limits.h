// The options of a master, and every bound on what peers can cause.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "pccl/base/allowance.h"
#include "pccl/base/error.h"
#include "pccl/topology/choose.h"
#include "pccl/wire/records.h"

namespace pccl::master {

// Bounds that no honest peer reaches. Tests set smaller values. In brackets: the test of each
// bound, in tests/test_limits.py or tests/test_hostile*.py.
struct Limits {
  // -- memory of the master
  std::size_t max_groups = 65536;  // [test_groups_have_a_limit]
  // Peers of a group, newcomers included. [test_a_full_group_refuses_newcomers]
  std::size_t max_peers = 4096;
  std::size_t max_open_calls = 1 << 16;  // operations of a group; as many rounds [TOO_OFTEN]
  // With more open operations, only kShortText bytes of each description are kept: the descriptions
  // of 65,536 operations would take gigabytes. [test_descriptions_of_many_operations_are_cut]
  std::size_t many_open_calls = 4096;
  // Lists of state entries in the open rounds of a group. [test_election.py]
  std::uint64_t max_open_bytes = std::uint64_t{4} << 30;
  // Lag of the slowest member in entries of the log. All members keep these entries; a member that
  // lags more is evicted. Heartbeats report progress, and `aborts` bounds how many calls can end
  // without the member. [test_a_member_that_never_says_what_it_has_applied...]
  std::size_t max_behind = 1 << 18;
  // Calls in which the threads of a peer wait. [test_what_no_honest_member...]
  std::size_t max_waits = 1024;
  // Members that have returned to a restarted master, and their reports, until the groups are
  // rebuilt. [test_returning_members_have_a_limit, test_reports_of_returning_members...]
  std::size_t max_recovering = 4096;
  std::size_t max_reported_bytes = 128 << 20;

  // -- events caused by one peer: a burst, and a rate per second. An honest peer causes a few of
  // these when something breaks; a peer that causes more is evicted. [TOO_OFTEN, and as noted]
  Rate strays{1024, 16};   // reports about peers that are not members, or of other admissions
  Rate aborts{65536, 64};  // calls that it ends for all members; see max_open_calls
  // Changes of a newcomer's state that the master sends to all members.
  // [test_a_newcomer_that_wants...]
  Rate turns{1024, 16};
  Rate restarts{64, 0.1};    // plans that are void since it stops sharing memory
  Rate talk{1 << 17, 2048};  // messages without another bound; see Budget::talk
  // Requests for relays that are answered. link::LinkTable sends fewer.
  // [test_questions_for_relays...]
  Rate wants{256, 8};
  // Breaks of one pair's link for which operations start over. If a link breaks more often, plans
  // avoid it where possible. [test_a_link_that_breaks_without_end...]
  Rate breaks{16, 0.1};
};

inline constexpr std::size_t kShortText = 128;  // bytes; see many_open_calls
// Every epoch has the addresses of all members, and must fit into a message (wire::kMaxPayload).
// [test_addresses_that_would_fill_every_epoch_are_refused]
inline constexpr std::size_t kMaxAddresses = 64;
inline constexpr std::size_t kMaxAddressBytes = 2048;  // of all host names of a peer
// Connections that one request for relays may ask for. [test_what_no_honest_member...]
inline constexpr std::uint32_t kMaxRelayStripes = 8;

// Questions of peers, before they join, about their own reachability.
// [test_each_question_has_its_time and following]
inline constexpr std::size_t kMaxQuestions = 4;  // at a time
inline constexpr Rate kQuestions{16, 1};         // of all peers together
inline constexpr std::size_t kMaxAsked = 4;      // members, for each question
inline constexpr unsigned kMaxInquiries = 8;     // on one connection
inline constexpr Duration kQuestionTime = std::chrono::milliseconds(2500);

// Questions for the status, and commands, of all operators together. [test_operators.py]
inline constexpr Rate kStatusQuestions{32, 8};
inline constexpr Rate kCommands{32, 4};
// A status has at most about this many bytes. Groups for which there is no room are left out.
inline constexpr std::size_t kMaxStatusBytes = std::size_t{8} << 20;
inline constexpr std::size_t kShownCalls = 64;    // of a group, in a status: the longest open ones
inline constexpr std::size_t kShownWaits = 4;     // of a member
inline constexpr std::size_t kShownNames = 8;     // members that a newcomer cannot reach
inline constexpr std::size_t kShownLinks = 4096;  // of a group
inline constexpr std::size_t kShownText = 256;    // bytes of a text that a peer has sent

// Epochs and ordinals continue from reported ones, and must not overflow.
inline constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 62;
// Terms must not overflow either. Each restart adds one; a member of this run may have followed a
// few masters that this one does not know. [test_a_term_that_no_restart_has_made_is_refused]
inline constexpr std::uint32_t kMaxTerm = std::uint32_t{1} << 31;
inline constexpr std::uint32_t kMaxTermsAhead = 16;
// Terms with which a master has served, and that it does not use again. Each takes a takeover.
inline constexpr std::size_t kMaxServedTerms = 65536;

// The master's place in the list of all masters of a run. See quorum.h.
struct MasterPlace {
  std::uint32_t masters = 1;  // 1: it is alone; there are no votes and no proposals
  std::uint32_t index = 0;

  [[nodiscard]] bool alone() const { return masters == 1; }
  // The lowest term of this master that is above `term`. No two masters share a term.
  [[nodiscard]] std::uint32_t term_after(std::uint32_t term) const {
    return (term / masters + 1) * masters + index;
  }
};

struct Options {
  std::uint32_t min_peers =
      1;  // a group starts with at least this many, whatever its peers ask for
  Duration heartbeat_interval = std::chrono::seconds(1);
  Duration heartbeat_timeout = std::chrono::seconds(6);
  Duration reconnect_timeout = std::chrono::seconds(10);
  // A member for which at least half of the group has waited this long is evicted; a call that most
  // members have not entered ends. Empty: never.
  std::optional<Duration> straggler_timeout = std::chrono::minutes(30);
  Duration replan_interval = std::chrono::seconds(30);  // see PCCL_REPLAN_INTERVAL
  Duration measure_after = std::chrono::seconds(1);     // see PCCL_MEASURE_AFTER; zero: never
  std::uint32_t segment_bytes = 512 << 10;
  topology::Thresholds thresholds;
  MasterPlace place;
  bool encrypted = false;  // the run has a secret; for the status only
  bool relays = false;     // the master relays between members that cannot connect; see PCCL_RELAY
  Limits limits;
};

// Members of a run that come from another master, or from before a restart, come in this time. At
// least 500 ms: peers that wait pause between two attempts.
[[nodiscard]] inline Duration quiet_time(const Options& options) {
  return std::max<Duration>(2 * options.heartbeat_interval, std::chrono::milliseconds(500));
}

// A connection must identify itself, and answer questions, within this time.
inline constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
// The control connection of a killed peer breaks within this time of its links.
inline constexpr Duration kBrokenLinkGrace = std::chrono::milliseconds(300);
// The wait for more signatures, which may show which member is the odd one out.
inline constexpr Duration kMismatchGrace = std::chrono::milliseconds(500);
// Members with several threads may look stuck for a moment when their threads take turns.
inline constexpr Duration kSeveralThreadsGrace = std::chrono::seconds(10);
inline constexpr Duration kStragglerNotice = std::chrono::seconds(10);
inline constexpr Duration kStragglerRepeat = std::chrono::minutes(1);

// The remaining rates of one peer. *one thread: the master's*
struct Budget {
  Allowance strays;
  Allowance aborts;
  Allowance turns;
  Allowance restarts;
  Allowance wants;

  // Charges one for a message, and one more for every 16 items of its list. False: over the rate.
  [[nodiscard]] bool talk(const Limits& limits, std::size_t items, Instant now) {
    return talk_.take(limits.talk, now, 1 + static_cast<double>(items) / 16);
  }
  // Items charged for returning, and for each log entry that is sent again.
  static constexpr std::size_t kReturnItems = 1024;
  static constexpr std::size_t kMissedEntryItems = 4;
  // Lists of state entries are charged by bytes: one item for this many.
  static constexpr std::size_t kBytesOfItem = 64;

 private:
  Allowance talk_;
};

}  // namespace pccl::master
