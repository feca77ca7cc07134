// The calls of a group that members have entered and that are not decided.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pccl/master/limits.h"
#include "pccl/master/peers.h"

namespace pccl::master {

struct OpenOperation {
  struct Entry {
    wire::Signature signature;
    std::uint64_t attempt = 0;
    bool done = false;
  };
  std::map<PeerId, Entry> entries;
  bool rerun = false;
  Instant opened{};
  std::optional<Instant> met;  // all members have entered
  std::optional<Instant> mismatch_since;
  std::optional<Instant> noticed;  // its members were told whom they wait for

  // It begins again in a new epoch.
  void restart() {
    for (auto& [id, entry] : entries) entry.done = false;
    met.reset();
    mismatch_since.reset();
  }
};

struct OpenRound {
  std::map<PeerId, wire::RoundPayload> entered;
  std::uint64_t bytes = 0;  // of all lists of entries that came
  Instant opened{};
  std::optional<Instant> noticed;  // its members were told whom they wait for
};

// The payload is of the kind that this kind of round has.
[[nodiscard]] bool payload_fits(const wire::RoundEntry& entry);
// About what the lists of a payload take to be held.
[[nodiscard]] std::uint64_t bytes_of(const wire::RoundPayload& payload);

// *one thread: the master's*
class OpenCalls {
 public:
  explicit OpenCalls(const Limits& limits) : limits_(limits) {}

  // -- entering. REQUIRES of enter: room_for the key, and of a round: not too_much.
  [[nodiscard]] bool room_for(const wire::OpKey& key) const {
    return operations_.size() < limits_.max_open_calls || operations_.contains(key);
  }
  [[nodiscard]] bool room_for(const wire::RoundKey& key) const {
    return rounds_.size() < limits_.max_open_calls || rounds_.contains(key);
  }
  // A member is in one sync at a time, and the lists of all members are bounded.
  [[nodiscard]] bool too_much(const PeerId& from, const wire::RoundEntry& entry) const;
  // `done`: of the present attempt. `members`: how many the group has.
  void enter(const PeerId& from, const wire::OpState& state, bool done, std::size_t members,
             Instant now);
  void enter(const PeerId& from, const wire::RoundEntry& entry, Instant now);
  // What the member says of its operation is no progress. `epoch`: the present one.
  [[nodiscard]] bool repeats(const PeerId& from, const wire::OpState& state, bool done,
                             std::uint64_t epoch) const;
  [[nodiscard]] bool entered(const PeerId& from, const wire::RoundKey& key) const;

  // -- ending
  void erase(const wire::CallKey& key);
  void clear();
  // A member is gone, and with it the calls that only it had entered.
  void drop_member(const PeerId& id);
  // Operations that do not run again end; the others begin again. Returns those that ended.
  [[nodiscard]] std::vector<wire::OpKey> abort_and_restart();
  void restart();

  // -- looking
  [[nodiscard]] std::map<wire::OpKey, OpenOperation>& operations() { return operations_; }
  [[nodiscard]] const std::map<wire::OpKey, OpenOperation>& operations() const {
    return operations_;
  }
  [[nodiscard]] std::map<wire::RoundKey, OpenRound>& rounds() { return rounds_; }
  [[nodiscard]] const std::map<wire::RoundKey, OpenRound>& rounds() const { return rounds_; }
  [[nodiscard]] bool entered_by_all(const wire::CallKey& key, std::size_t members) const;
  // The member is in some call.
  [[nodiscard]] bool busy(const PeerId& id) const;
  // The member that has entered the most open calls. When there are too many, it made the calls
  // that the other members have not entered.
  [[nodiscard]] PeerId busiest() const;
  // Signatures differ somewhere, and a grace period runs.
  [[nodiscard]] bool disagree() const;
  [[nodiscard]] std::vector<std::pair<wire::CallKey, PeerId>> entries() const;
  // "collective #3 (all_gather of float32[8])", as far as members have said what it is.
  [[nodiscard]] std::string described(const wire::CallKey& key) const;
  [[nodiscard]] std::string summary() const;

 private:
  const Limits& limits_;
  std::map<wire::OpKey, OpenOperation> operations_;
  std::map<wire::RoundKey, OpenRound> rounds_;
};

}  // namespace pccl::master
