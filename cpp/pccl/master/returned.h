// A member that came back to a master which does not know its group, since it was restarted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "pccl/wire/messages.h"

namespace pccl::master {

using ConnectionId = std::uint64_t;  // given by the server; 0 is none
// A member's id and seal: whoever shows the ticket for it is that member.
using Seat = std::pair<PeerId, PeerId>;

// Its record is kept as bytes, since decoded it would take several times as much, and but once for
// all that report the same, as honest members do.
class Returned {
 public:
  Returned(ConnectionId connection, const wire::Rejoin& rejoin);

  [[nodiscard]] ConnectionId connection() const { return connection_; }
  [[nodiscard]] const Seat& seat() const { return seat_; }
  // Its last epoch, and the last entry of the log that it has applied.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> at() const { return at_; }
  // Of that epoch.
  [[nodiscard]] const std::vector<Seat>& members() const { return record_->members; }
  [[nodiscard]] wire::Rejoin rejoin() const;

  // False if `other` reports another record. Else both have one in common from now on.
  bool share(const Returned& other);
  [[nodiscard]] std::size_t record_bytes() const;
  // One for all that share it.
  [[nodiscard]] const void* record() const { return record_.get(); }

 private:
  struct Record {
    std::vector<Seat> members;
    wire::Bytes bytes;
    std::size_t hash = 0;
  };

  ConnectionId connection_;
  Seat seat_;
  std::pair<std::uint64_t, std::uint64_t> at_;
  std::shared_ptr<const Record> record_;
  std::uint32_t group_;
  PeerId ticket_;
};

// The one that knows most. REQUIRES: reports is not empty.
[[nodiscard]] const Returned& newest(const std::vector<Returned>& reports);

}  // namespace pccl::master
