#include "pccl/master/returned.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string_view>

#include "pccl/digest/ticket.h"

namespace pccl::master {
namespace {

std::vector<Seat> seats_in(const wire::EpochRecord& record) {
  std::vector<Seat> seats;
  seats.reserve(record.members.size());
  for (const wire::Member& member : record.members) seats.emplace_back(member.id, member.seal);
  return seats;
}

std::size_t hash_of(std::span<const std::uint8_t> bytes) {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

std::size_t hash_of(const std::vector<Seat>& seats) {
  std::size_t hash = 0;
  for (const Seat& seat : seats)
    hash = hash * 31 + hash_of(seat.first.bytes) + hash_of(seat.second.bytes);
  return hash;
}

}  // namespace

Returned::Returned(ConnectionId connection, const wire::Rejoin& rejoin)
    : connection_(connection),
      seat_(rejoin.id, digest::seal_of(rejoin.ticket)),
      at_(rejoin.record.epoch, rejoin.applied),
      group_(rejoin.group),
      ticket_(rejoin.ticket) {
  auto record = std::make_shared<Record>();
  record->members = seats_in(rejoin.record);
  record->members_hash = hash_of(record->members);
  record->bytes = wire::encoded(rejoin.record);
  record->bytes.shrink_to_fit();
  record->hash = hash_of(record->bytes);
  record_ = std::move(record);
  const auto own = std::ranges::find(record_->members, seat_);
  if (own != record_->members.end())
    place_ = static_cast<std::size_t>(own - record_->members.begin());
}

wire::Rejoin Returned::rejoin() const {
  wire::Rejoin rejoin{seat_.first, group_, {}, at_.second, ticket_};
  wire::Reader reader(record_->bytes);
  reader(rejoin.record);
  if (!reader.complete()) throw std::logic_error("a packed record cannot be decoded");
  return rejoin;
}

bool Returned::share(const Returned& other) {
  if (record_->hash != other.record_->hash || record_->bytes != other.record_->bytes) return false;
  record_ = other.record_;
  return true;
}

std::size_t Returned::record_bytes() const {
  return record_->bytes.capacity() + record_->members.capacity() * sizeof(Seat);
}

AcceptedEpoch::AcceptedEpoch(const wire::Accepted& accepted)
    : term_(accepted.term),
      epoch_(std::get<wire::EpochRecord>(accepted.entry.what).epoch),
      members_(seats_in(std::get<wire::EpochRecord>(accepted.entry.what))),
      members_hash_(hash_of(members_)) {
  bytes_ = wire::encoded(accepted.entry);
  bytes_.shrink_to_fit();
}

wire::LogEntry AcceptedEpoch::entry() const {
  wire::LogEntry entry;
  wire::Reader reader(bytes_);
  reader(entry);
  if (!reader.complete()) throw std::logic_error("a packed epoch cannot be decoded");
  return entry;
}

std::size_t AcceptedEpoch::bytes() const {
  return bytes_.capacity() + members_.capacity() * sizeof(Seat);
}

const Returned& newest(const std::vector<Returned>& reports) {
  return *std::ranges::max_element(reports, [](const Returned& a, const Returned& b) {
    return a.at() < b.at() || (a.at() == b.at() && a.place() > b.place());
  });
}

}  // namespace pccl::master
