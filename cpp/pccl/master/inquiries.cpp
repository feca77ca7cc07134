#include "pccl/master/inquiries.h"

#include <algorithm>
#include <utility>

#include "pccl/base/utf8.h"
#include "pccl/base/version.h"
#include "pccl/wire/address.h"

namespace pccl::master {
namespace {

constexpr std::size_t kMaxShown = 16;  // members in an answer

}  // namespace

// Whether `address`, as the master sees it, denotes the same host for this member. (A member that
// connects by loopback is on the master's host.)
bool Inquiries::may_try(ConnectionId member, const std::string& address) const {
  const ControlPeer* const connection = connections_.find(member);
  if (connection == nullptr) return false;
  const wire::Reach theirs = wire::reach_of(connection->address);
  switch (wire::reach_of(address)) {
    case wire::Reach::nobody:
      return false;
    case wire::Reach::host:
      return theirs == wire::Reach::host;
    case wire::Reach::network:
      return theirs == wire::Reach::host || theirs == wire::Reach::network;
    case wire::Reach::everybody:
      return true;
  }
  return false;
}

void Inquiries::on_inquiry(ConnectionId id, ControlPeer& connection, const wire::Inquiry& inquiry,
                           Instant now) {
  if (connection.question != 0)
    return connections_.refuse(id, Code::refused, "one question at a time");
  // An answer is far longer than a question.
  if (++connection.inquiries > kMaxInquiries)
    return connections_.refuse(id, Code::refused, "too many questions");
  connection.since = now;  // answers may take a while; see kHandshakeTimeout
  wire::Findings findings;
  findings.software = kSoftware;
  findings.seen = connection.address;
  findings.relays = options_.relays;
  Group* const group = served_.find(inquiry.group);
  if (group != nullptr) {
    const std::vector<wire::Member>& members = group->record().members;
    findings.size = static_cast<std::uint32_t>(members.size());
    for (const wire::Member& member : members) {
      if (findings.members.size() >= kMaxShown) break;
      findings.members.push_back({member.id, member.joined, member.addresses, {}, member.replica});
    }
  }
  if (inquiry.port == 0) return served_.send(id, 0, findings);
  if (questions_.size() >= kMaxQuestions || !attempts_.take(kQuestions, now)) {
    findings.attempt.reached = wire::Reached::busy;
    return served_.send(id, 0, findings);
  }
  const std::uint64_t number = connection.question = next_question_++;
  const wire::Address address{connection.address, inquiry.port};
  outbox_.add(TryAddress{id, address});
  if (group != nullptr) {
    const auto fit = [&](ConnectionId member) { return may_try(member, address.host); };
    for (const PeerId& peer : group->ask_members({number, address}, kMaxAsked, fit))
      findings.attempts.push_back({peer, wire::Reached::not_tried, {}});
  }
  questions_[number] = {id, now + kQuestionTime, std::move(findings)};
  outbox_.log_rarely("connection from " + connection.address + " asks who reaches its port " +
                     std::to_string(inquiry.port));
}

void Inquiries::on_tried(ConnectionId for_whom, bool reached, const std::string& reason,
                         Instant now) {
  for (auto& [number, question] : questions_) {
    if (question.from != for_whom) continue;
    question.findings.attempt = {{}, reached ? wire::Reached::yes : wire::Reached::no, reason};
  }
  answer(now);
}

void Inquiries::on_tried(const PeerId& peer, const wire::Tried& tried, Instant now) {
  const auto it = questions_.find(tried.number);
  if (it == questions_.end()) return;
  for (wire::Attempt& attempt : it->second.findings.attempts) {
    if (attempt.peer != peer || attempt.reached != wire::Reached::not_tried) continue;
    attempt.reached = tried.reached ? wire::Reached::yes : wire::Reached::no;
    attempt.reason = shortened(tried.reason, 200);
  }
  answer(now);
}

void Inquiries::answer(Instant now) {
  for (auto it = questions_.begin(); it != questions_.end();) {
    const wire::Findings& findings = it->second.findings;
    const bool all = findings.attempt.reached != wire::Reached::not_tried &&
                     std::ranges::find(findings.attempts, wire::Reached::not_tried,
                                       &wire::Attempt::reached) == findings.attempts.end();
    if (all || now >= it->second.until) {
      served_.send(it->second.from, 0, findings);
      it = questions_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace pccl::master
