#include "pccl/master/connections.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pccl::master {

std::uint64_t next_run(std::uint64_t run) {
  std::uint64_t mixed = run + 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return (mixed ^ (mixed >> 31)) | 1;
}

std::vector<wire::LogEntry> AskedLog::log() const {
  std::vector<wire::LogEntry> whole;
  whole.reserve(entries);
  for (const wire::Bytes& encoded : parts) {
    wire::Reader reader(encoded);
    wire::LogPart part;
    reader(part);
    std::move(part.entries.begin(), part.entries.end(), std::back_inserter(whole));
  }
  return whole;
}

void Connections::add(ConnectionId id, const std::string& address) {
  ControlPeer& made = connections_[id];
  made.address = address;
  made.since = outbox_.now();
}

const ControlPeer* Connections::find(ConnectionId id) const {
  const auto it = connections_.find(id);
  return it == connections_.end() ? nullptr : &it->second;
}

ControlPeer* Connections::open(ConnectionId id) {
  const auto it = connections_.find(id);
  return it == connections_.end() || it->second.closing ? nullptr : &it->second;
}

void Connections::send(ConnectionId to, std::uint32_t term, std::uint64_t collected,
                       const wire::Message& message) {
  if (open(to) == nullptr) return;
  const wire::Envelope envelope{run_.id, term, collected};
  if (const auto* welcome = std::get_if<wire::Welcome>(&message)) {
    wire::Welcome complete = *welcome;
    complete.masters = options_.place.masters;
    return outbox_.add(Send{to, wire::encode(envelope, complete)});
  }
  outbox_.add(Send{to, wire::encode(envelope, message)});
}

void Connections::close(ConnectionId id) {
  ControlPeer* const connection = open(id);
  if (connection == nullptr) return;
  connection->closing = true;
  outbox_.add(Close{id});
}

void Connections::refuse(ConnectionId id, Code code, const std::string& reason) {
  const ControlPeer* const connection = open(id);
  if (connection == nullptr) return;
  // A peer ignores a term below the one that it has followed.
  send(id, std::max(run_.term, connection->term), 0, wire::Refused{code, reason});
  close(id);
}

}  // namespace pccl::master
