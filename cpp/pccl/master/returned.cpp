#include "pccl/master/returned.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "pccl/digest/ticket.h"

namespace pccl::master {

Returned::Returned(ConnectionId connection, const wire::Rejoin& rejoin)
    : connection_(connection),
      seat_(rejoin.id, digest::seal_of(rejoin.ticket)),
      at_(rejoin.record.epoch, rejoin.applied),
      group_(rejoin.group),
      ticket_(rejoin.ticket) {
  auto record = std::make_shared<Record>();
  for (const wire::Member& member : rejoin.record.members)
    record->members.emplace_back(member.id, member.seal);
  wire::Writer writer(record->bytes);
  writer(rejoin.record);
  record->bytes.shrink_to_fit();
  record->hash = std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(record->bytes.data()), record->bytes.size()});
  record_ = std::move(record);
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

const Returned& newest(const std::vector<Returned>& reports) {
  return *std::ranges::max_element(
      reports, [](const Returned& a, const Returned& b) { return a.at() < b.at(); });
}

}  // namespace pccl::master
