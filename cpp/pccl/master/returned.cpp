#include "pccl/master/returned.h"

#include <stdexcept>
#include <string_view>
#include <variant>

#include "pccl/net/ticket.h"

namespace pccl::master {
namespace {

wire::Bytes pack(const wire::Rejoin& rejoin) {
  wire::Bytes bytes = wire::encode({}, rejoin);
  bytes.shrink_to_fit();
  return bytes;
}

wire::Rejoin unpack(const wire::Bytes& bytes) {
  wire::FrameReader reader;
  reader.feed(bytes);
  wire::Frame frame;
  const auto whole = reader.next(frame);
  if (!whole || !*whole) throw std::logic_error("what was packed cannot be unpacked");
  return std::get<wire::Rejoin>(std::move(frame.message));
}

}  // namespace

Returned::Returned(ConnectionId connection, const wire::Rejoin& rejoin)
    : connection_(connection),
      seat_(rejoin.id, net::seal_of(rejoin.ticket)),
      at_(rejoin.report.record.epoch, rejoin.report.applied) {
  wire::Rejoin part;
  part.report.record = rejoin.report.record;
  auto record = std::make_shared<Record>();
  for (const wire::Member& member : part.report.record.members)
    record->members.emplace_back(member.id, member.seal);
  record->bytes = pack(part);
  record->hash = std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(record->bytes.data()), record->bytes.size()});
  record_ = std::move(record);
  part = rejoin;
  part.report.record = {};
  rest_ = pack(part);
}

wire::Rejoin Returned::rejoin() const {
  wire::Rejoin whole = unpack(rest_);
  whole.report.record = unpack(record_->bytes).report.record;
  return whole;
}

bool Returned::share(const Returned& other) {
  if (record_->hash != other.record_->hash || record_->bytes != other.record_->bytes) return false;
  record_ = other.record_;
  return true;
}

std::size_t Returned::record_bytes() const {
  return record_->bytes.capacity() + record_->members.capacity() * sizeof(Seat);
}

}  // namespace pccl::master
