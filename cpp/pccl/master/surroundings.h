// The surroundings of a group: its master, and the rules of replicas.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/limits.h"
#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// Events and questions about replicas: see replicas.h. By default there are none.
class ReplicaRules {
 public:
  virtual ~ReplicaRules() = default;
  // Why a peer cannot join its group. Empty: it can.
  [[nodiscard]] virtual std::string objection(const wire::Join&) const { return {}; }
  // An event may let admissions or the start proceed.
  virtual void changed() {}
  // A member or a newcomer has left or was removed. `finished`: a member left regularly.
  virtual void departed(std::uint32_t /*group*/, const wire::Member&, const std::string& /*reason*/,
                        bool /*member*/, bool /*finished*/) {}
  // A newcomer has lost its connection or withdrawn.
  virtual void away(std::uint32_t /*group*/, const wire::Member&, const std::string& /*reason*/) {}
  // All members of the group are at this admission point. Returns the replicas to admit there.
  // Empty optional: not decided, or not ready yet; Group::retry_admission follows.
  virtual std::optional<std::vector<std::string>> to_admit(std::uint32_t /*group*/,
                                                           std::uint64_t /*point*/) {
    return std::nullopt;
  }
  // Whether replicas would be admitted at this point.
  [[nodiscard]] virtual bool wait(std::uint32_t /*group*/, std::uint64_t /*point*/) const {
    return false;
  }
  // Whether replicas have members, in any group.
  [[nodiscard]] virtual bool started() const { return false; }
  // The number of replicas that must still join before the start.
  [[nodiscard]] virtual std::uint32_t missing() const { return 0; }
};

// A line of the master's log.
struct LogLine {
  // Trouble, or a command: the status marks it. The log prints all lines alike, since the peers
  // warn their users themselves.
  bool warning = false;
  std::optional<std::uint32_t> group;  // empty: it is about none
  std::uint64_t epoch = 0;             // of the group
  std::string text;
};

// The interface of a group to its master.
class Surroundings {
 public:
  virtual ~Surroundings() = default;
  virtual void send(ConnectionId to, std::uint64_t collected, const wire::Message& message) = 0;
  virtual void close(ConnectionId connection) = 0;
  virtual void log(LogLine line) = 0;
  // The time of the present event.
  [[nodiscard]] virtual Instant now() const { return {}; }
  // The operator has stopped the admission of newcomers to groups that have started.
  [[nodiscard]] virtual bool admission_paused() const { return false; }
  // The group's log has a new entry, which is sent next.
  virtual void appended(std::uint32_t /*group*/, const wire::LogEntry&) {}
  virtual wire::Census census() = 0;
  virtual std::uint64_t next_join_ordinal() = 0;

  // Begins to relay a connection between two peers. `names`: for the log. Returns a token for each.
  virtual std::optional<std::pair<RelayToken, RelayToken>> expect_relay(
      const PeerId& /*one*/, const PeerId& /*other*/, const std::string& /*names*/) {
    return std::nullopt;
  }
  virtual void end_relay(const PeerId& /*one*/, const PeerId& /*other*/) {}
  virtual ReplicaRules& replicas() {
    static ReplicaRules none;
    return none;
  }
};

// The library makes the groups from this number on itself, and says how many peers start them.
constexpr std::uint32_t kOwnGroups = 1U << 31U;
// The last of them are pairs, on which the run does not depend: two peers meet there for a while.
// DiLoCo's newcomers receive the state in the first of these, and the others are doors, where
// followers of a run come and go.
constexpr std::uint32_t kFirstDoor = 3U << 30U;
constexpr std::uint32_t kFirstPair = kFirstDoor - (1U << 28U);

// The context of a group, which all its parts share.
struct GroupContext {
  std::uint32_t id;  // of the group
  const Options& options;
  Surroundings& around;
  const wire::EpochRecord& record;  // of the present epoch, with the outcomes since

  // The operator's min_peers, which is for the groups of users.
  [[nodiscard]] std::uint32_t min_peers() const { return id < kOwnGroups ? options.min_peers : 1; }

  void note(std::string line, bool warning = false) const {
    if (id < kFirstPair) around.log({warning, id, record.epoch, std::move(line)});
  }
};

}  // namespace pccl::master
