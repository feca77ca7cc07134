// Several masters: holds back what a group has decided until a majority of its members has accepted
// it. The group itself decides as if it were alone. Pure: no clock, no sockets.
//
// A group's *acceptors* are the members of its last decided epoch. If their number is even, the
// master that made that epoch has a vote too, so a majority exists on one side at most. An epoch is
// decided when a majority of the acceptors of the epoch before it has accepted it. Verdicts and
// outcomes need no votes, but those that follow an epoch in the log wait for it.
// docs/internals/several-masters.md has the rules and the proof.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <vector>

#include "pccl/master/returned.h"
#include "pccl/wire/messages.h"

namespace pccl::master {

[[nodiscard]] std::set<Seat> seats_of(const wire::EpochRecord& record);
// Votes that decide: more than half of all. `members`: of the last decided epoch.
[[nodiscard]] constexpr std::size_t majority_of(std::size_t members) { return members / 2 + 1; }

// Holds back the messages of one group. *one thread: the master's*
class Quorum {
 public:
  // A message or the end of a connection. Empty message: close the connection.
  struct Held {
    ConnectionId to = 0;
    std::uint64_t collected = 0;
    std::optional<wire::Message> message;
    std::uint64_t after = 0;  // ordinal of the epoch that must be decided first
  };

  // A group without members: its first epoch is the master's own decision.
  explicit Quorum(std::uint32_t term) : term_(term), own_(true) {}
  // A group that this master takes over. `decided`: the last decided epoch; `ordinal`: of the last
  // entry known to be decided. `collected`: as DecisionLog::collected.
  Quorum(std::uint32_t term, const wire::EpochRecord& decided, std::uint64_t ordinal,
         std::uint64_t collected)
      : term_(term), decided_(ordinal), acceptors_(seats_of(decided)), collected_(collected) {}

  // -- what the group decides
  // The group's log has a new entry. Call before it is sent.
  void appended(const wire::LogEntry& entry, Instant now);
  // Splits what may be sent now from what must wait, which it keeps.
  [[nodiscard]] std::vector<Held> pass(ConnectionId to, std::uint64_t collected,
                                       wire::Message message);
  [[nodiscard]] bool holds_closing(ConnectionId connection);

  // -- votes
  // The epoch that is proposed now. Null: everything is decided.
  [[nodiscard]] const wire::LogEntry* proposal() const {
    return pending_.empty() ? nullptr : &pending_.front();
  }
  [[nodiscard]] bool accepts(const Seat& seat) const { return acceptors_.contains(seat); }
  void accepted(const Seat& seat, std::uint64_t ordinal);
  // The member has left in good order, and votes for nothing else any more.
  void left(const Seat& seat);
  // True once for every new proposal: it must be sent.
  [[nodiscard]] bool fresh_proposal();
  // Decides the proposal if it has the votes. `connected`: acceptors that can still vote. True: it
  // is decided; take released(), and propose again.
  [[nodiscard]] bool decide(const std::set<Seat>& connected, Instant now);
  // Takes the messages that no longer have to wait, in order.
  [[nodiscard]] std::vector<Held> released();

  // -- time
  // Whether this master must step down: a proposal was not decided, or a majority was away, for
  // `limit`.
  [[nodiscard]] bool hopeless(const std::set<Seat>& connected, Duration limit, Instant now);
  // As of the last hopeless().
  [[nodiscard]] bool has_majority() const { return !alone_since_; }
  // The master was frozen.
  void excuse(Instant now);

  // -- state
  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] std::uint64_t collected(std::uint64_t now_collected);

 private:
  [[nodiscard]] std::size_t own_vote() const { return own_ && acceptors_.size() % 2 == 0 ? 1 : 0; }

  std::uint32_t term_;
  std::uint64_t decided_ = 0;  // the last ordinal that may be sent
  std::set<Seat> acceptors_;
  bool own_ = false;                    // this master made the last decided epoch, in this term
  std::deque<wire::LogEntry> pending_;  // epochs that are not decided, in order
  std::set<Seat> votes_;                // for the first of them
  std::set<Seat> left_;
  std::deque<Held> held_;
  std::uint64_t collected_ = 0;
  std::uint64_t proposed_ = 0;  // ordinal of the last proposal that was sent
  Instant proposed_at_{};
  std::optional<Instant> alone_since_;  // a majority is away
};

}  // namespace pccl::master
