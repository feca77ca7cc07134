// Questions of peers, before they join, about their own reachability.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "pccl/base/allowance.h"
#include "pccl/master/served_groups.h"

namespace pccl::master {

// *one thread: the master's*
class Inquiries {
 public:
  Inquiries(const Options& options, Connections& connections, Outbox& outbox, ServedGroups& served)
      : options_(options), connections_(connections), outbox_(outbox), served_(served) {}

  // The master and the members try only the address from which the question comes, once per
  // connection and a few at a time. So no peer can use the run to scan for open ports.
  void on_inquiry(ConnectionId id, ControlPeer& connection, const wire::Inquiry& inquiry,
                  Instant now);
  // The master's own attempt to reach the peer of a connection has ended.
  void on_tried(ConnectionId for_whom, bool reached, const std::string& reason, Instant now);
  // A member's attempt has ended.
  void on_tried(const PeerId& peer, const wire::Tried& tried, Instant now);
  // Answers questions that have all results, or whose time is over.
  void answer(Instant now);
  // The connection with this question is gone.
  void forget(std::uint64_t question) { questions_.erase(question); }

 private:
  struct Question {
    ConnectionId from = 0;
    Instant until{};
    wire::Findings findings;
  };

  [[nodiscard]] bool may_try(ConnectionId member, const std::string& address) const;

  const Options& options_;
  Connections& connections_;
  Outbox& outbox_;
  ServedGroups& served_;
  std::map<std::uint64_t, Question> questions_;  // by their numbers
  std::uint64_t next_question_ = 1;
  Allowance attempts_;  // to reach asking peers
};

}  // namespace pccl::master
