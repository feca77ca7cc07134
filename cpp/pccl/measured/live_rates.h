// Measures links to other hosts during transfers: rates of saturated links, and round trips of idle
// links. A transfer shows the rate of its bottleneck, and only lower bounds for all else. So a rate
// is taken from links that had more to send than their connections took, at every look. Sans-I/O:
// the engine reports what moved.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "pccl/base/ids.h"
#include "pccl/wire/records.h"

namespace pccl::measured {

// The round trips of the connections to these members when they were made, for a first plan. Empty
// unless one of them is long: among near hosts differences are noise, and all links count as equal.
[[nodiscard]] wire::Measurements first_round_trips(
    std::span<const wire::Member> members,
    const std::function<Duration(const PeerId&)>& round_trip);

// *one thread: the engine's*
class LiveRates {
 public:
  // A rate needs this much time in which links were full. It includes some slow starts.
  static constexpr Duration kEnough = std::chrono::seconds(2);
  // For this long after a report, rates are compared with the report, not with the table.
  static constexpr Duration kSayAgain = std::chrono::seconds(60);

  struct Way {
    PeerId peer;
    std::uint64_t sent = 0;      // bytes since the last look
    std::uint64_t received = 0;  // bytes since the last look
    bool full = false;           // there is more to send than its connections take
  };
  // The rates of this member in the group's table. 0: unknown.
  struct Known {
    wire::HostRate host;
    std::function<wire::LinkRate(const PeerId&)> link;
  };

  // Call at regular intervals during transfers. `span`: since the last look.
  void look(std::span<const Way> ways, Duration span);
  // A look was skipped, or was not usable: the next one does not count as the second in a row.
  void skip() { were_full_.clear(); }
  // A round trip on an idle link.
  void on_round_trip(const PeerId& peer, Duration rtt);
  // The round trip of a connection when it was made, which no data has delayed. It is reported
  // where none is known.
  void on_connection(const PeerId& peer, std::uint32_t rtt_us);
  // The plan and the table have changed: drops incomplete measurements and earlier reports.
  void forget();

  // Returns the rates that differ enough from the known ones to be reported; empty: none.
  [[nodiscard]] wire::Measurements news(const Known& known, Instant now);
  // The last report of this host's rates; 0: none since forget().
  [[nodiscard]] const wire::HostRate& last_said() const { return said_.value; }

 private:
  struct Count {
    Duration time{};
    std::uint64_t bytes = 0;
    [[nodiscard]] bool enough() const { return time >= kEnough; }
    // kB/s
    [[nodiscard]] std::uint32_t rate() const;
    // Nothing moved: a pause of unknown length, which would lower the rate.
    void stalled() {
      time = {};
      bytes = 0;
    }
    void add(Duration span, std::uint64_t more) {
      time += span;
      bytes += more;
    }
  };
  // A rate below the known one counts once the next one is lower, too. Returns the higher of both;
  // 0: not confirmed.
  struct Lower {
    std::uint32_t before = 0;
    [[nodiscard]] std::uint32_t confirmed(std::uint32_t rate, bool lower);
  };
  struct Counts {
    Count beside;  // full, as were other used links
    Count alone;   // full, the other used links were not: they waited for this one
    Count only;    // full, no other link was used
    Lower lower;
    std::optional<Duration> rtt;   // the least
    std::uint32_t connection = 0;  // microseconds; 0: unknown
    unsigned round_trips = 0;
  };
  template <class Value>
  struct Said {
    Value value{};
    Instant at{};
  };

  std::map<PeerId, bool> were_full_;
  std::map<PeerId, Counts> ways_;
  Count all_full_;  // all used links were full: the up-link is the bottleneck
  Lower lower_;     // of all_full_
  Count out_;       // all looks
  Count in_;
  Said<wire::HostRate> said_;
  std::map<PeerId, Said<wire::LinkRate>> said_of_;
};

}  // namespace pccl::measured
