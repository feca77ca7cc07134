// The status of a run: one value, made by the master, of which every view is made. Bytes on the
// wire, in StatusParts. Texts that come from peers may have any bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pccl/wire/records.h"

namespace pccl::wire {

// All times are milliseconds, measured by the master.

// A call in which a thread of a member waits, as the member reports.
struct WaitStatus {
  std::string call;  // describe(CallKey)
  std::uint64_t for_ms = 0;
  bool operator==(const WaitStatus&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.call, self.for_ms); }
};

struct MemberStatus {
  std::string name;  // shown_name
  PeerId id;
  std::string address;   // the first one
  std::string software;  // empty: it joined another master
  std::string replica;
  std::uint32_t host = 0;       // ranks with the same number share memory
  std::uint64_t member_ms = 0;  // since it was admitted, or returned to this master
  std::uint64_t heard_ms = 0;   // since its last message
  bool connected = false;       // to the master
  bool draining = false;        // it will leave at its next admission point
  std::uint64_t behind = 0;     // entries of the log that it has not applied
  std::vector<WaitStatus> waits;
  WorkDone totals;
  WorkDone recent;              // added within the latest `recent_ms`
  std::uint64_t recent_ms = 0;  // 0: not known yet
  bool operator==(const MemberStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.name, self.id, self.address, self.software, self.replica, self.host, self.member_ms,
          self.heard_ms, self.connected, self.draining, self.behind, self.waits, self.totals,
          self.recent, self.recent_ms);
  }
};

enum class NewcomerState : std::uint8_t {
  joined,    // its program has made no collective call yet
  asks,      // waits for the start of the group
  connects,  // to the members
  ready,     // enters at the next admission point, unless admission is paused
};
constexpr unsigned enum_count(NewcomerState) { return 4; }

struct NewcomerStatus {
  std::string name;
  PeerId id;
  std::string address;
  std::uint64_t joined_ms = 0;
  NewcomerState state = NewcomerState::joined;
  std::vector<std::string> without;  // members that it cannot reach, by its own report
  bool operator==(const NewcomerStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.name, self.id, self.address, self.joined_ms, self.state, self.without);
  }
};

// A call that some members have entered.
struct CallStatus {
  std::string call;
  std::string what;  // the arrays, for operations
  std::uint64_t open_ms = 0;
  std::vector<std::uint32_t> entered;  // ranks
  std::vector<std::uint32_t> missing;  // ranks
  bool operator==(const CallStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.call, self.what, self.open_ms, self.entered, self.missing);
  }
};

enum class LinkCondition : std::uint8_t {
  ok,
  relayed,      // it goes through the master, where it is needed
  avoided,      // by plans
  unreachable,  // and the next ones: as the member `from` reports
  silent,
  broken,
};
constexpr unsigned enum_count(LinkCondition) { return 6; }

struct LinkStatus {
  std::uint32_t from = 0;  // a rank
  std::uint32_t to = 0;
  LinkRate rate;
  LinkCondition condition = LinkCondition::ok;
  std::string reason;
  bool operator==(const LinkStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.from, self.to, self.rate, self.condition, self.reason);
  }
};

struct PlanStatus {
  std::string why;  // the reason for the choice; empty: it was the only one
  std::uint32_t segment_bytes = 0;
  std::vector<SizeClass> classes;
  bool operator==(const PlanStatus&) const = default;
  static void fields(auto& self, auto& visit) { visit(self.why, self.segment_bytes, self.classes); }
};

struct GroupStatus {
  std::uint32_t group = 0;
  std::uint64_t epoch = 0;  // 0: it has not started
  std::uint64_t epoch_ms = 0;
  Cause cause = Cause::admission;
  std::uint32_t min_peers = 1;
  std::uint32_t missing = 0;          // peers or replicas, until the start
  std::vector<MemberStatus> members;  // by rank
  std::vector<NewcomerStatus> newcomers;
  std::vector<CallStatus> calls;  // the longest open ones first
  std::vector<LinkStatus> links;  // about which something is known
  PlanStatus plan;
  std::uint64_t operations = 0;  // committed, as the oldest members report
  std::uint64_t aborted = 0;     // calls that ended with an error
  bool operator==(const GroupStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.group, self.epoch, self.epoch_ms, self.cause, self.min_peers, self.missing,
          self.members, self.newcomers, self.calls, self.links, self.plan, self.operations,
          self.aborted);
  }
};

// A line of the master's log.
struct EventStatus {
  std::uint64_t ago_ms = 0;
  bool warning = false;
  bool of_group = false;  // group and epoch have a meaning
  std::uint32_t group = 0;
  std::uint64_t epoch = 0;
  std::string text;
  bool operator==(const EventStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.ago_ms, self.warning, self.of_group, self.group, self.epoch, self.text);
  }
};

struct RunStatus {
  std::string software;  // of the master
  std::uint64_t run = 0;
  std::uint32_t term = 0;
  std::uint64_t master_ms = 0;  // since this master began
  bool encrypted = false;
  bool relays = false;
  bool admission_paused = false;
  std::uint64_t evictions = 0;  // members that this master removed, or that were lost
  std::vector<GroupStatus> groups;
  std::uint32_t left_out = 0;       // groups for which there was no room
  std::vector<EventStatus> events;  // the latest last
  bool operator==(const RunStatus&) const = default;
  static void fields(auto& self, auto& visit) {
    visit(self.software, self.run, self.term, self.master_ms, self.encrypted, self.relays,
          self.admission_paused, self.evictions, self.groups, self.left_out, self.events);
  }
};

}  // namespace pccl::wire
