// What a master can be told, and every bound on what peers may cause.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "pccl/base/allowance.h"
#include "pccl/base/error.h"
#include "pccl/topology/choose.h"
#include "pccl/wire/records.h"

namespace pccl::master {

// Bounds that no honest peer meets. tests/test_hostile.py has a test for each, with smaller values.
struct Limits {
  // -- what the master holds for one group
  std::size_t max_peers = 4096;
  std::size_t max_open_calls = 1 << 16;
  // With more open operations than these, only `short_text` bytes of each description are kept: the
  // descriptions of 65,536 operations would take gigabytes.
  std::size_t many_open_calls = 4096;
  std::size_t short_text = 128;
  std::uint64_t max_open_bytes = std::uint64_t{4} << 30;  // lists of state entries in open rounds
  // Entries of the log between the newest one and the slowest member's. All members keep entries
  // until the slowest has applied them; a member that lags more is evicted. Each heartbeat says how
  // far a member is, and `aborts` bounds how many calls can end without it.
  std::size_t max_behind = 1 << 18;
  // Pairs of members that the master relays, and connections of a pair that one request asks for.
  std::size_t max_relayed = wire::kMaxRelayed;
  std::uint32_t max_relay_stripes = 8;

  // -- what one peer may report. Every epoch has all members' addresses, and must fit into a
  // message (wire::kMaxPayload).
  std::size_t max_addresses = 64;
  std::size_t max_address_bytes = 2048;  // of all its host names
  std::size_t max_waits = 1024;          // calls in which its threads wait

  // -- how often one peer may do it: at once, and per second after that. An honest peer does each
  // of these a few times when something breaks; a peer that does more is evicted.
  Rate strays{1024, 16};     // reports about peers that are no members, or of other admissions
  Rate aborts{65536, 64};    // calls that it ends for all: as many as may be open
  Rate turns{1024, 16};      // changes of a newcomer that all members are told
  Rate restarts{64, 0.1};    // plans that it undoes, because it shares memory no more
  Rate talk{1 << 17, 2048};  // messages without another bound; see Budget::talk
  // Requests for relays that are answered. link::LinkTable asks no more often than this.
  Rate wants{256, 8};
  // Breaks of one pair's link for which operations start over. With more, the plan does without
  // that link, if there is such a plan.
  Rate breaks{16, 0.1};
};

struct Options {
  std::uint32_t min_peers = 1;  // a group starts with at least so many, whatever its peers ask for
  Duration heartbeat_interval = std::chrono::seconds(1);
  Duration heartbeat_timeout = std::chrono::seconds(6);
  Duration reconnect_timeout = std::chrono::seconds(10);
  // A member that at least half of the group has waited for so long is evicted; a call that most
  // members have not made ends. Empty: never.
  std::optional<Duration> straggler_timeout = std::chrono::minutes(30);
  Duration replan_interval = std::chrono::seconds(30);  // for what transfers have shown
  Duration measure_after = std::chrono::seconds(1);     // of an operation; zero: never
  std::uint32_t segment_bytes = 512 << 10;
  topology::Thresholds thresholds;
  // Where no plan does without links that cannot be made, the master relays.
  bool relays = false;
  Limits limits;
};

// A connection has to say who is on it within this time, and to answer questions.
inline constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
// The control connection of a killed peer breaks within this time of its links.
inline constexpr Duration kBrokenLinkGrace = std::chrono::milliseconds(300);
// More signatures may still tell which member called something else.
inline constexpr Duration kMismatchGrace = std::chrono::milliseconds(500);
// Members with several threads look stuck for a moment when their threads take turns.
inline constexpr Duration kSeveralThreadsGrace = std::chrono::seconds(10);
inline constexpr Duration kStragglerNotice = std::chrono::seconds(10);
inline constexpr Duration kStragglerRepeat = std::chrono::minutes(1);

// What is left of one peer's rates. *one thread: the master's*
struct Budget {
  Allowance strays;
  Allowance aborts;
  Allowance turns;
  Allowance restarts;
  Allowance wants;

  // A message costs one, and one more for every 16 items of its list. False: it was once too often.
  [[nodiscard]] bool talk(const Limits& limits, std::size_t items, Instant now) {
    return talk_.take(limits.talk, now, 1 + static_cast<double>(items) / 16);
  }
  // Items that it costs to come back, and for each entry of the log that is sent again.
  static constexpr std::size_t kReturnItems = 1024;
  static constexpr std::size_t kMissedEntryItems = 4;
  // Lists of entries of a state are counted in bytes: so many are an item.
  static constexpr std::size_t kBytesOfItem = 64;

 private:
  Allowance talk_;
};

}  // namespace pccl::master
