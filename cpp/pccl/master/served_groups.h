// The groups that a master serves. With several masters a Quorum stands between each of them and
// its peers. Pure: messages in, actions out, no clock, no sockets.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "pccl/master/connections.h"
#include "pccl/master/group.h"
#include "pccl/master/quorum.h"
#include "pccl/master/replicas.h"

namespace pccl::master {

// *one thread: the master's*
class ServedGroups {
 public:
  // `around`: of the groups that begin here.
  ServedGroups(const Options& options, ServedRun& run, Connections& connections, Outbox& outbox,
               Surroundings& around)
      : options_(options), run_(run), connections_(connections), outbox_(outbox), around_(around) {}

  [[nodiscard]] const Groups& all() const { return groups_; }
  // Null: this master does not serve the group.
  [[nodiscard]] Group* find(std::uint32_t group) const;
  // Null: this master does not serve the group, or it is alone.
  [[nodiscard]] Quorum* quorum(std::uint32_t group);
  [[nodiscard]] const Quorum* quorum(std::uint32_t group) const;
  [[nodiscard]] const std::map<std::uint32_t, Quorum>& quorums() const { return quorums_; }
  // Whether the connection's peer is a member of an epoch.
  [[nodiscard]] bool member(ConnectionId connection) const;
  // Whether members of a group have begun here, or were taken over. The run does not depend on
  // pairs: those do not count with `pairs` false.
  [[nodiscard]] bool begun(bool pairs) const;
  // Whether all groups are over; so are no groups.
  [[nodiscard]] bool over() const;
  [[nodiscard]] bool undecided() const { return !undecided_.empty(); }
  [[nodiscard]] wire::Census census() const;

  // -- groups that begin and end
  // Whether the group exists or may begin. Keeps empty groups for late peers while there is room.
  [[nodiscard]] bool has_room(std::uint32_t group);
  // The peer becomes a newcomer of its group, or is refused.
  void join(ConnectionId id, ControlPeer& connection, const wire::Join& join, Instant now);
  void put(std::uint32_t group, std::unique_ptr<Group> made) { groups_[group] = std::move(made); }
  // The quorum of a group that is taken over, and put next.
  void put(std::uint32_t group, Quorum quorum);
  // The lowest term above `term` with which this master has not served.
  [[nodiscard]] std::uint32_t new_term(std::uint32_t term) const;
  // Drops a group that is empty, and which never had a member or is a pair.
  void forget(std::uint32_t group);
  // Drops all such groups.
  void forget_empty();
  // Forgets this group only: the others have their members here, and do not depend on it.
  void abandon(std::uint32_t group);
  void erase(std::uint32_t group);
  void clear();

  // -- messages
  // Sends it, or keeps it until what was decided before it has the votes.
  void send(ConnectionId to, std::uint64_t collected, const wire::Message& message);
  // Closes it after what is kept for it.
  void close(ConnectionId connection);
  // Heartbeats to all peers: these never wait for votes.
  void send_heartbeats();

  // -- votes
  // The group's log has a new entry. Call before it is sent.
  void appended(std::uint32_t group, const wire::LogEntry& entry);
  // The acceptors that are connected.
  [[nodiscard]] std::set<Seat> voters(std::uint32_t group, const Quorum& quorum) const;
  void hear_vote(const ControlPeer& connection, const wire::Frame& frame);
  void propose_to(ConnectionId id, const Quorum& quorum);
  // Proposes what is new, and sends what has been decided.
  void settle(Instant now);

 private:
  [[nodiscard]] Group& group_for(std::uint32_t id);
  [[nodiscard]] bool is_over(std::uint32_t group) const;
  [[nodiscard]] Quorum* quorum_of(ConnectionId connection);
  bool settle(std::uint32_t group, Quorum& quorum, Instant now);

  const Options& options_;
  ServedRun& run_;
  Connections& connections_;
  Outbox& outbox_;
  Surroundings& around_;
  Groups groups_;
  std::map<std::uint32_t, Quorum> quorums_;  // of all groups; several masters
  std::set<std::uint32_t> undecided_;        // the groups that have a proposal
  std::set<std::uint32_t> served_terms_;     // with which this master has served a group
  std::uint32_t abandoned_ = 0;              // the highest term of a group that was abandoned
};

}  // namespace pccl::master
