// What transfers show, as they go on, of the ways to other hosts: how fast ways are that always had
// something to send, and round trips of links at rest. A transfer shows the speed of what holds it
// up, and of all else only that it is at least as fast; so a rate is taken from links whose
// connections had more than they could take, at every look. Sans-I/O: the engine says what moved.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "pccl/base/ids.h"
#include "pccl/base/pace.h"
#include "pccl/wire/records.h"

namespace pccl::measured {

// *one thread: the engine's*
class LiveRates {
 public:
  // Of a time in which links were full so long a rate is taken; it has some slow starts in it.
  static constexpr Duration kEnough = std::chrono::seconds(2);
  // What was said is not said again so soon, while it stays about the same.
  static constexpr Duration kSayAgain = std::chrono::seconds(60);

  struct Way {
    PeerId peer;
    std::uint64_t sent = 0;      // bytes since the last look
    std::uint64_t received = 0;  // the same
    bool full = false;           // there is more to send than its connections take
  };
  // What the group's table has of this member. 0: nothing.
  struct Known {
    wire::HostRate host;
    std::function<wire::LinkRate(const PeerId&)> link;
  };

  // At regular times while something moves; `span` since the last look.
  void look(std::span<const Way> ways, Duration span);
  // A look was left out, or showed something else.
  void skip() { were_full_.clear(); }
  // A round trip while nothing else was under way.
  void on_round_trip(const PeerId& peer, Duration rtt);
  // Another plan, and another table: what is half counted is of no use, nor what was said of the
  // table before.
  void forget();

  // What differs from what is known, and is worth saying; empty if nothing does.
  [[nodiscard]] wire::Measurements news(const Known& known, Instant now);

 private:
  struct Count {
    Duration time{};
    std::uint64_t bytes = 0;
    [[nodiscard]] bool enough() const { return time >= kEnough; }
    // kB/s
    [[nodiscard]] std::uint32_t rate() const;
    // Nothing moved: a pause, of which nobody knows how long it will be.
    void stalled() {
      time = {};
      bytes = 0;
    }
    void add(Duration span, std::uint64_t more) {
      time += span;
      bytes += more;
    }
  };
  // A rate that is lower than what is known counts when the next one is as well: the higher of
  // both.
  struct Lower {
    std::uint32_t before = 0;
    [[nodiscard]] std::uint32_t confirmed(std::uint32_t rate, bool lower);
  };
  struct Counts {
    Count beside;  // full, as others were
    Count alone;   // full, while others that were used were not: it held them up
    Count only;    // full, and no other was used
    Lower lower;
    std::optional<Duration> rtt;  // the least
    unsigned round_trips = 0;
  };
  template <class Value>
  struct Said {
    Value value{};
    Instant at{};
  };

  std::map<PeerId, bool> were_full_;
  std::map<PeerId, Counts> ways_;
  Count all_full_;  // all that were used: what holds them up is the up-link
  Lower lower_;     // the same, of it
  Count out_;       // at any time
  Count in_;
  Said<wire::HostRate> said_;
  std::map<PeerId, Said<wire::LinkRate>> said_of_;
};

}  // namespace pccl::measured
