#include "pccl/master/quorum.h"

#include <algorithm>
#include <utility>

namespace pccl::master {

std::set<Seat> seats_of(const wire::EpochRecord& record) {
  std::set<Seat> seats;
  for (const wire::Member& member : record.members) seats.emplace(member.id, member.seal);
  return seats;
}

// -- what the group decides

void Quorum::appended(const wire::LogEntry& entry, Instant now) {
  if (std::holds_alternative<wire::EpochRecord>(entry.what)) {
    if (pending_.empty()) proposed_at_ = now;
    pending_.push_back(entry);
  } else if (pending_.empty()) {
    decided_ = entry.ordinal;
  }
}

std::uint64_t Quorum::collected(std::uint64_t now_collected) {
  // A member that an undecided epoch removes may still need entries.
  if (pending_.empty()) collected_ = std::max(collected_, now_collected);
  return std::min(collected_, now_collected);
}

std::vector<Quorum::Held> Quorum::pass(ConnectionId to, std::uint64_t now_collected,
                                       wire::Message message) {
  std::vector<Held> now;
  const std::uint64_t upto = collected(now_collected);
  if (pending_.empty() || std::holds_alternative<wire::Welcome>(message)) {
    now.push_back({to, upto, std::move(message), 0});
    return now;
  }
  auto* const log = std::get_if<wire::Log>(&message);
  if (log == nullptr) {
    held_.push_back({to, now_collected, std::move(message), pending_.back().ordinal});
    return now;
  }
  // Entries wait for the epoch at or before them.
  std::uint64_t after = 0;
  std::vector<wire::LogEntry> part;
  const auto end_part = [&] {
    if (part.empty()) return;
    wire::Log piece{std::exchange(part, {})};
    if (after == 0) {
      now.push_back({to, upto, std::move(piece), 0});
    } else {
      held_.push_back({to, now_collected, std::move(piece), after});
    }
  };
  for (wire::LogEntry& entry : log->entries) {
    std::uint64_t last = 0;
    for (const wire::LogEntry& pending : pending_)
      if (pending.ordinal <= entry.ordinal) last = pending.ordinal;
    if (last != after) end_part();
    after = last;
    part.push_back(std::move(entry));
  }
  end_part();
  return now;
}

bool Quorum::holds_closing(ConnectionId connection) {
  if (pending_.empty()) return false;
  held_.push_back({connection, 0, std::nullopt, pending_.back().ordinal});
  return true;
}

// -- votes

void Quorum::accepted(const Seat& seat, std::uint64_t ordinal) {
  if (!pending_.empty() && pending_.front().ordinal == ordinal && accepts(seat))
    votes_.insert(seat);
}

void Quorum::left(const Seat& seat) {
  if (accepts(seat)) left_.insert(seat);
}

bool Quorum::fresh_proposal() {
  if (pending_.empty() || pending_.front().ordinal == proposed_) return false;
  proposed_ = pending_.front().ordinal;
  return true;
}

bool Quorum::decide(const std::set<Seat>& connected, Instant now) {
  if (pending_.empty()) return false;
  const std::size_t needed = majority_of(acceptors_.size());
  std::size_t votes = votes_.size() + own_vote();
  if (votes < needed) {
    // A member that has left cannot vote for another epoch, so its vote counts for this one, but
    // only if all members that remain have voted: they must hold what is decided.
    const bool all = std::ranges::all_of(
        connected, [&](const Seat& seat) { return votes_.contains(seat) || left_.contains(seat); });
    if (!all) return false;
    for (const Seat& seat : left_)
      if (!votes_.contains(seat)) ++votes;
    if (votes < needed) return false;
  }
  const wire::LogEntry entry = std::move(pending_.front());
  pending_.pop_front();
  decided_ = entry.ordinal;
  acceptors_ = seats_of(std::get<wire::EpochRecord>(entry.what));
  own_ = true;
  votes_.clear();
  std::erase_if(left_, [&](const Seat& seat) { return !accepts(seat); });
  proposed_at_ = now;
  alone_since_.reset();
  return true;
}

std::vector<Quorum::Held> Quorum::released() {
  std::vector<Held> now;
  std::deque<Held> still;
  for (Held& held : held_) {
    if (held.after <= decided_) {
      held.collected = collected(held.collected);
      now.push_back(std::move(held));
    } else {
      still.push_back(std::move(held));
    }
  }
  held_ = std::move(still);
  return now;
}

// -- time

bool Quorum::hopeless(const std::set<Seat>& connected, Duration limit, Instant now) {
  if (!pending_.empty() && now - proposed_at_ >= limit) return true;
  const std::size_t here = connected.size() + own_vote();
  if (here >= majority_of(acceptors_.size())) {
    alone_since_.reset();
    return false;
  }
  if (!alone_since_) alone_since_ = now;
  return now - *alone_since_ >= limit;
}

void Quorum::excuse(Instant now) {
  proposed_at_ = now;
  if (alone_since_) alone_since_ = now;
}

}  // namespace pccl::master
