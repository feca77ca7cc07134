// A member that has returned to a restarted master, which does not know its group yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "pccl/wire/messages.h"

namespace pccl::master {

using ConnectionId = std::uint64_t;  // given by the server; 0 is none
// A member's id and seal. The peer with the ticket for this seal is that member.
using Seat = std::pair<PeerId, Seal>;

// The record is kept as bytes, which take a fraction of its decoded size, and shared between
// members that report the same record, as honest members do.
class Returned {
 public:
  Returned(ConnectionId connection, const wire::Rejoin& rejoin);

  [[nodiscard]] ConnectionId connection() const { return connection_; }
  [[nodiscard]] const Seat& seat() const { return seat_; }
  [[nodiscard]] std::uint32_t group() const { return group_; }
  // Its last epoch, and the ordinal of the last log entry that it has applied.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> at() const { return at_; }
  // The members of that epoch.
  [[nodiscard]] const std::vector<Seat>& members() const { return record_->members; }
  // Its place among these, which are in the order in which they were admitted.
  [[nodiscard]] std::size_t place() const { return place_; }
  [[nodiscard]] wire::Rejoin rejoin() const;

  [[nodiscard]] std::size_t members_hash() const { return record_->members_hash; }

  // Shares the record of `other` if both are equal. False: they differ.
  bool share(const Returned& other);
  [[nodiscard]] std::size_t record_bytes() const;
  // The identity of the record: equal for all reports that share it.
  [[nodiscard]] const void* record() const { return record_.get(); }

 private:
  struct Record {
    std::vector<Seat> members;
    wire::Bytes bytes;
    std::size_t hash = 0;
    std::size_t members_hash = 0;
  };

  ConnectionId connection_;
  Seat seat_;
  std::pair<std::uint64_t, std::uint64_t> at_;
  std::size_t place_ = std::numeric_limits<std::size_t>::max();
  std::shared_ptr<const Record> record_;
  std::uint32_t group_;
  Ticket ticket_;
};

// An epoch that a returning member has accepted as the next one. Kept as Returned keeps records.
class AcceptedEpoch {
 public:
  explicit AcceptedEpoch(const wire::Accepted& accepted);

  [[nodiscard]] std::uint32_t term() const { return term_; }
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }
  [[nodiscard]] const std::vector<Seat>& members() const { return members_; }
  [[nodiscard]] std::size_t members_hash() const { return members_hash_; }
  [[nodiscard]] wire::LogEntry entry() const;
  [[nodiscard]] std::size_t bytes() const;
  bool operator==(const AcceptedEpoch& other) const {
    return term_ == other.term_ && bytes_ == other.bytes_;
  }

 private:
  std::uint32_t term_;
  std::uint64_t epoch_;
  std::vector<Seat> members_;
  std::size_t members_hash_ = 0;
  wire::Bytes bytes_;  // of the entry
};

// A peer's promise. Null: it has accepted nothing that is not decided.
struct Promised {
  std::shared_ptr<const AcceptedEpoch> accepted;
};

// The report with the newest log; of several, that of the member that was admitted first, since a
// log begins with its member's admission. REQUIRES: reports is not empty.
[[nodiscard]] const Returned& newest(const std::vector<Returned>& reports);

}  // namespace pccl::master
