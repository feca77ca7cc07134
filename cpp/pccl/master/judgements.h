// The master's judgements: pure functions that also give the reason.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// Names a member in a sentence: "rank 2 (trainer-3)".
using Naming = std::function<std::string(const PeerId&)>;

// A member's signature of an operation. Claims are in rank order.
struct Claim {
  PeerId peer;
  wire::Signature signature;
};

// The odd one out, and the sentence for all members.
struct Mismatch {
  PeerId culprit;
  std::string reason;
};

// Judges claims that disagree. The most common signature is the intended one (ties: the
// longest-standing member's); the longest-standing member with another one is the odd one out.
// Empty: the claims agree, or more claims could still change the judgement, since not all `members`
// have entered, no signature has a majority, and `waited_enough` is false.
[[nodiscard]] std::optional<Mismatch> judge_mismatch(const std::string& call,
                                                     const std::vector<Claim>& claims,
                                                     std::size_t members, bool waited_enough,
                                                     const Naming& who);

// A report that the link between two members does not work.
struct BadLink {
  PeerId reporter;
  PeerId about;
};

// The member to evict for links that stay down: the one in most reported pairs; ties: the newest. A
// pair reported from both ends counts once. Empty: no pair of members is reported. REQUIRES:
// `members` are in order of joining.
[[nodiscard]] std::optional<PeerId> judge_links(const std::vector<PeerId>& members,
                                                const std::vector<BadLink>& reports);

// One member's report about its threads.
struct Waiting {
  PeerId peer;
  bool current = false;  // the member had applied the whole log when it reported
  wire::Blocked blocked;
};

// suspicious: stuck if this persists. A member with several threads may look stuck for a moment.
enum class Stuckness { moving, suspicious, stuck };

// A group is stuck when every member is blocked, no member has a thread outside a call, no link
// moves bytes, and no call with waiting members has been entered by all. `meets(call)`: all members
// have entered the call.
template <class Meets>
[[nodiscard]] Stuckness judge_stuck(const std::vector<Waiting>& members, const Meets& meets) {
  bool several_threads = false;
  for (const Waiting& member : members) {
    if (!member.current || member.blocked.waits.empty() || member.blocked.outside ||
        member.blocked.moving) {
      return Stuckness::moving;
    }
    several_threads = several_threads || member.blocked.multi_threaded;
    for (const wire::CallKey& call : member.blocked.waits) {
      if (meets(call)) return Stuckness::moving;
    }
  }
  if (members.empty()) return Stuckness::moving;
  return several_threads ? Stuckness::suspicious : Stuckness::stuck;
}

// "rank 0 (trainer-3) waits in barrier #3" for each member, separated by `between`. `name(call)`:
// the name of a call.
[[nodiscard]] std::string describe_waiting(
    const std::vector<Waiting>& members, const std::string& between, const Naming& who,
    const std::function<std::string(const wire::CallKey&)>& name);

}  // namespace pccl::master
