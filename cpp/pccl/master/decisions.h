// The master's judgements, each a pure function that also says why.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pccl/base/ids.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

// A member's signature of an operation, in rank order.
struct Claim {
  PeerId peer;
  wire::Signature signature;
  std::size_t rank = 0;
};

// Who is the odd one out, and the sentence for everybody.
struct Mismatch {
  PeerId culprit;
  std::string reason;
};

// The members that entered disagree. The signature held by most is taken as meant (ties: the
// longest-standing member's); the longest-standing member with another one is the odd one out.
// Nothing while the claims agree, or while more claims could still tell who is odd: `members` have
// not all entered, no signature has a majority of them, and `waited_enough` is false.
[[nodiscard]] std::optional<Mismatch> judge_mismatch(const std::string& call,
                                                     const std::vector<Claim>& claims,
                                                     std::size_t members, bool waited_enough);

// Two members say, one of them or both, that the link between them does not work.
struct BadLink {
  PeerId reporter;
  PeerId about;
};

// Whom to evict for links that stay down: the peer in most reported pairs; ties: the newest.
// `members` in order of joining. A pair reported from both ends counts once. Nothing when no pair
// is left.
[[nodiscard]] std::optional<PeerId> judge_links(const std::vector<PeerId>& members,
                                                const std::vector<BadLink>& reports);

// What the master knows of one member's threads.
struct Waiting {
  PeerId peer;
  bool current = false;  // it has blocked threads, and had seen all we sent when it said so
  wire::Blocked blocked;
};

// How a group stands: moving, stuck, or stuck if it stays so (some member has several threads).
enum class Stuckness { moving, suspicious, stuck };

// A group is stuck when every member is blocked, none has a thread outside, no link moves bytes and
// no call that somebody waits in has been entered by all. REQUIRES: `meets` says of a call whether
// all members have entered it.
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

// "rank 0 (1a2b3c4d) waits in barrier #3", and so on for each member. `name`: what a call is
// called.
[[nodiscard]] std::string describe_waiting(
    const std::vector<Waiting>& members, const std::string& between,
    const std::function<std::string(const wire::CallKey&)>& name);

}  // namespace pccl::master
