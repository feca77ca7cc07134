// The undecided calls that members of a group have entered.
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

// *one thread: the master's*
class OpenOperation {
 public:
  struct Entry {
    wire::Signature signature;
    std::uint64_t attempt = 0;
    bool current = false;  // no epoch since has made the attempt void
    bool done = false;
  };

  // Replaces the member's earlier entry. REQUIRES: a done entry is current.
  void enter(const PeerId& from, Entry entry);
  void drop_member(const PeerId& id);
  // Starts over in a new epoch, which makes all attempts void.
  void restart();

  [[nodiscard]] const std::map<PeerId, Entry>& entries() const { return entries_; }
  [[nodiscard]] std::size_t done() const { return done_; }  // number of done entries
  // Whether all current entries have the same signature. A signature depends on the plan, so the
  // others do not count.
  [[nodiscard]] bool agree() const { return signatures_.size() < 2; }

  bool rerun = false;
  Instant opened{};
  std::optional<Instant> met;  // when all members had entered
  std::optional<Instant> mismatch_since;
  std::optional<Instant> noticed;       // when its members were last told which peers are missing
  std::optional<Instant> quorum_since;  // see wire::Patience

 private:
  void forget(const Entry& entry);

  std::map<PeerId, Entry> entries_;
  // Numbers of entries. They are not counted for each report, since each of hundreds of members
  // reports.
  std::size_t done_ = 0;
  std::map<std::uint64_t, std::size_t> signatures_;  // current ones, by signature hash
};

struct OpenRound {
  std::map<PeerId, wire::RoundPayload> entered;
  std::uint64_t bytes = 0;  // of the lists in all payloads
  Instant opened{};
  std::optional<Instant> noticed;       // when its members were last told which peers are missing
  std::optional<Instant> quorum_since;  // see wire::Patience
};

// Whether the payload has the type that this kind of round requires.
[[nodiscard]] bool payload_fits(const wire::RoundEntry& entry);
// The approximate memory of a payload's lists.
[[nodiscard]] std::uint64_t bytes_of(const wire::RoundPayload& payload);

// *one thread: the master's*
class OpenCalls {
 public:
  explicit OpenCalls(const Limits& limits) : limits_(limits) {}

  // -- entering. enter() REQUIRES: room_for(key), and for a round: not too_much().
  [[nodiscard]] bool room_for(const wire::OpKey& key) const {
    return operations_.size() < limits_.max_open_calls || operations_.contains(key);
  }
  [[nodiscard]] bool room_for(const wire::RoundKey& key) const {
    return rounds_.size() < limits_.max_open_calls || rounds_.contains(key);
  }
  // Whether the member is in another round of this kind already, or all lists together would be too
  // long. Entries without a payload are never too much.
  [[nodiscard]] bool too_much(const PeerId& from, const wire::RoundEntry& entry) const;
  // `current`: no epoch has made the attempt void. `members`: the size of the group.
  void enter(const PeerId& from, const wire::OpState& state, bool current, std::size_t members,
             Instant now);
  void enter(const PeerId& from, const wire::RoundEntry& entry, Instant now);
  // Whether the member's report about its operation shows no progress. `epoch`: the present one.
  [[nodiscard]] bool repeats(const PeerId& from, const wire::OpState& state, bool done,
                             std::uint64_t epoch) const;
  [[nodiscard]] bool entered(const PeerId& from, const wire::RoundKey& key) const;

  // -- ending
  void erase(const wire::CallKey& key);
  void clear();
  void drop_member(const PeerId& id);
  // Ends operations that do not run again, and calls that no member has entered; restarts the other
  // operations. Returns the operations that ended because they do not run again.
  [[nodiscard]] std::vector<wire::OpKey> abort_and_restart();
  void restart();  // as a new epoch begins

  // -- stuck. No member can proceed, until unstick(), restart() or clear().
  // Returns since when.
  Instant stuck(Instant now) {
    if (!stuck_since_) stuck_since_ = now;
    return *stuck_since_;
  }
  void unstick() { stuck_since_.reset(); }

  // -- looking
  [[nodiscard]] std::map<wire::OpKey, OpenOperation>& operations() { return operations_; }
  [[nodiscard]] const std::map<wire::OpKey, OpenOperation>& operations() const {
    return operations_;
  }
  [[nodiscard]] std::map<wire::RoundKey, OpenRound>& rounds() { return rounds_; }
  [[nodiscard]] const std::map<wire::RoundKey, OpenRound>& rounds() const { return rounds_; }
  [[nodiscard]] bool entered_by_all(const wire::CallKey& key, std::size_t members) const;
  [[nodiscard]] std::vector<wire::CallKey> keys() const;  // operations first
  // Whether the member is in a call.
  [[nodiscard]] bool busy(const PeerId& id) const;
  // The member that has entered the most open calls. When too many calls are open, this member made
  // those that the others have not entered.
  [[nodiscard]] PeerId busiest() const;
  // Whether signatures differ in some operation, or the group may be stuck.
  [[nodiscard]] bool doubtful() const;
  [[nodiscard]] std::vector<std::pair<wire::CallKey, PeerId>> entries() const;
  // "collective #3 (all_gather of float32[8])"; without the description if none was reported.
  [[nodiscard]] std::string described(const wire::CallKey& key) const;
  [[nodiscard]] std::string summary() const;

 private:
  const Limits& limits_;
  std::map<wire::OpKey, OpenOperation> operations_;
  std::map<wire::RoundKey, OpenRound> rounds_;
  std::optional<Instant> stuck_since_;
};

}  // namespace pccl::master
