#include "pccl/peer/session.h"

#include <algorithm>
#include <utility>

#include "pccl/base/overloaded.h"
#include "pccl/base/text.h"
#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

Error broken(std::string why) { return {Code::refused, std::move(why)}; }

Error other_list(const std::string& theirs, std::uint32_t own) {
  return {Code::invalid_argument,
          theirs + ", and this peer has " + plural(own, "address", "es") +
              ": all masters and peers need the same list, in the same order"};
}

}  // namespace

Error loss_error(const wire::EpochRecord& record) {
  Error error{Code::peer_lost, {}};
  for (const wire::Departure& gone : record.departures) {
    if (!error.reason.empty()) error.reason += "; ";
    if (gone.id.empty()) {
      error.reason += gone.reason;
    } else {
      error.reason += "peer " + gone.name + " is out: " + gone.reason;
      if (error.peer.empty()) error.peer = gone.id;
    }
  }
  return error;
}

// Between Rejoin and Welcome no other messages but LogParts are sent: a restarted master does not
// know this peer yet. Changes from that time are reported after Welcome.
void Session::say(const wire::Message& message) {
  const bool first = std::holds_alternative<wire::Join>(message) ||
                     std::holds_alternative<wire::Rejoin>(message) ||
                     std::holds_alternative<wire::LogPart>(message) ||
                     std::holds_alternative<wire::MayFound>(message) ||
                     std::holds_alternative<wire::Promise>(message) ||
                     std::holds_alternative<wire::Accept>(message);
  if (!open_ || (!welcomed_ && !first)) return;
  output_.push_back(wire::encode({run_, term_, applied_}, message));
}

void Session::on_open(std::uint32_t master, bool may_found) {
  open_ = true;
  master_ = master;
  welcomed_ = false;
  reader_ = wire::FrameReader();
  to_apply_.clear();
  if (member()) {
    say(rejoin());
  } else {
    // The run that welcomed this newcomer may be over, or may not have begun. Its links belong to
    // it until another master answers.
    const bool anew = options_.masters > 1 && !promised_;
    if (anew) term_ = 0;
    const std::uint64_t run = std::exchange(run_, anew ? 0 : run_);
    if (may_found) say(wire::MayFound{});
    say(wire::Join{options_.id, options_.group, options_.min_peers, options_.waiting,
                   options_.start_only, options_.addresses, options_.software, options_.order,
                   options_.memory_key, options_.replica, options_.ranks_per_replica,
                   options_.ticket, options_.name, options_.heartbeats});
    run_ = run;
  }
}

void Session::on_lost() {
  open_ = false;
  welcomed_ = false;
  output_.clear();
}

void Session::say_again(const std::vector<wire::Message>& open_calls) {
  // Admission may have been requested between the Join of this connection and its answer.
  if (!member() && options_.waiting && !options_.start_only) say(wire::RequestAdmission{});
  for (const wire::Message& message : open_calls) say(message);
  // Sent even if it is empty now.
  if (neighbourhood_) say(*neighbourhood_);
}

Session::Next Session::next() {
  while (open_) {
    if (!to_apply_.empty()) {
      const wire::LogEntry entry = std::move(to_apply_.front());
      to_apply_.pop_front();
      auto event = apply(entry);
      if (!event || *event) return event;
      continue;
    }
    wire::Frame frame;
    const Result<bool> got = reader_.next(frame);
    if (!got) return got.error();
    if (!*got) break;
    auto event = on_frame(frame);
    if (!event || *event) return event;
  }
  return Event{};
}

Session::Next Session::on_frame(const wire::Frame& frame) {
  const bool several = options_.masters > 1;
  if (!several && std::holds_alternative<wire::NotServing>(frame.message))
    return other_list("this master is one of several", options_.masters);
  if (const auto* welcome = std::get_if<wire::Welcome>(&frame.message);
      welcome != nullptr && welcome->masters != options_.masters) {
    return other_list("this master is one of " + std::to_string(welcome->masters),
                      options_.masters);
  }
  if (std::holds_alternative<wire::NotServing>(frame.message)) {
    if (member()) return broken("a master that answers no Join");
    return Event{std::get<wire::NotServing>(frame.message)};
  }
  // A majority of one list is none of another one.
  if (several && frame.envelope.term % options_.masters != master_ &&
      !std::holds_alternative<wire::Refused>(frame.message))
    return other_list("this master has another place in its own list", options_.masters);
  // From a master that was replaced. A newcomer with one address takes whatever master is there.
  if (frame.envelope.term < term_ && (several || member())) {
    if (several) return broken("this master was replaced");
    return Event{};
  }
  // A standby that takes over may have been told an epoch that never was.
  if (const auto* refused = std::get_if<wire::Refused>(&frame.message);
      refused != nullptr && several && member() && !welcomed_ && frame.envelope.term != served_ &&
      !accepted_its_removal())
    return Event{LeftBehind{{refused->code, refused->reason}}};
  if (joined_ && member() && frame.envelope.run != run_ &&
      !std::holds_alternative<wire::Refused>(frame.message))
    return broken("the master speaks of another run");
  run_ = frame.envelope.run;
  term_ = frame.envelope.term;
  if (frame.envelope.ordinal > collected_) {
    collected_ = std::min(frame.envelope.ordinal, applied_);
    while (!log_.empty() && log_.front().ordinal <= collected_) log_.pop_front();
  }
  return std::visit(
      Overloaded{
          [&](const wire::Welcome& welcome) -> Next {
            welcomed_ = true;
            served_ = term_;
            return Event{Welcomed{welcome, std::exchange(joined_, true)}};
          },
          [&](const wire::Refused& refused) -> Next {
            // On a mismatched call, this peer is the one that differs.
            const bool odd = refused.code == Code::mismatched_call;
            return Event{Dismissed{{refused.code, refused.reason, odd ? options_.id : PeerId{}}}};
          },
          [&](const wire::Log& log) -> Next {
            to_apply_.insert(to_apply_.end(), log.entries.begin(), log.entries.end());
            return Event{};
          },
          [&](const wire::RequestLog&) -> Next {
            if (!member() || welcomed_) return broken("the master asks for a log that is not due");
            for (const wire::LogPart& part : log_parts()) say(part);
            return Event{};
          },
          [&](const wire::AskPromise&) -> Next {
            if (!several || welcomed_) return broken("the master asks for a promise not due");
            wire::Promise promise;
            if (accepted_) promise.accepted.push_back(*accepted_);
            promised_ = true;
            say(promise);
            return Event{};
          },
          [&](const wire::Propose& propose) -> Next {
            if (!several) return broken("a message that masters do not send");
            return accept(propose.entry);
          },
          [](const wire::Prepare& prepare) -> Next { return Event{prepare}; },
          [](const wire::Expect& expect) -> Next { return Event{expect}; },
          [](const wire::Notice& notice) -> Next { return Event{notice}; },
          [](const wire::Try& question) -> Next { return Event{question}; },
          [](const wire::Relay& relay) -> Next { return Event{relay}; },
          [](const wire::Drain& drain) -> Next { return Event{drain}; },
          [](const wire::Heartbeat&) -> Next { return Event{}; },
          [](const auto&) -> Next { return broken("a message that masters do not send"); },
      },
      frame.message);
}

// Accepts an epoch as the next entry of the log. It has not happened before the log says so.
Session::Next Session::accept(const wire::LogEntry& entry) {
  const auto* epoch = std::get_if<wire::EpochRecord>(&entry.what);
  if (epoch == nullptr) return broken("the master proposes what is no epoch");
  if (!member()) return Event{};
  if (entry.ordinal <= applied_) {  // decided already
    if (std::find(log_.begin(), log_.end(), entry) != log_.end()) say(wire::Accept{entry.ordinal});
    return Event{};
  }
  if (entry.ordinal != applied_ + 1 || epoch->epoch != record_->epoch + 1)
    return broken("the master proposes an epoch that does not come next");
  accepted_ = wire::Accepted{term_, entry};
  say(wire::Accept{entry.ordinal});
  return Event{};
}

// The master before has proposed an epoch without this member, which may be decided.
bool Session::accepted_its_removal() const {
  if (!accepted_) return false;
  const auto& members = std::get<wire::EpochRecord>(accepted_->entry.what).members;
  return std::none_of(members.begin(), members.end(),
                      [&](const wire::Member& member) { return member.id == options_.id; });
}

Session::Next Session::apply(const wire::LogEntry& entry) {
  if (member()) {
    if (entry.ordinal <= applied_) return Event{};  // sent again after a reconnect
    if (entry.ordinal != applied_ + 1) return broken("the master skipped entries of the log");
  } else if (!std::holds_alternative<wire::EpochRecord>(entry.what)) {
    return broken("the log of a newcomer must begin with an epoch");
  }
  if (const auto* epoch = std::get_if<wire::EpochRecord>(&entry.what)) {
    const std::string senseless = "the master sent an epoch that makes no sense";
    const bool in = std::any_of(epoch->members.begin(), epoch->members.end(),
                                [&](const wire::Member& m) { return m.id == options_.id; });
    if (!in || !topology::valid(epoch->plan, epoch->members.size())) return broken(senseless);
    if (const Status relays = wire::check_relays(*epoch); !relays)
      return broken(senseless + ": " + relays.error().reason);
  }
  applied_ = entry.ordinal;
  accepted_.reset();
  log_.push_back(entry);
  return std::visit(Overloaded{
                        [&](const wire::EpochRecord& epoch) -> Next {
                          record_ = std::make_shared<const wire::EpochRecord>(epoch);
                          return Event{NewEpoch{record_}};
                        },
                        [](const wire::Verdict& verdict) -> Next { return Event{verdict}; },
                        [&](const wire::Outcome& outcome) -> Next {
                          if (wire::changes_record(outcome, *record_)) {
                            auto record = std::make_shared<wire::EpochRecord>(*record_);
                            wire::apply(outcome, *record);
                            record_ = std::move(record);
                          }
                          return Event{outcome};
                        },
                    },
                    entry.what);
}

wire::Rejoin Session::rejoin() const {
  wire::Rejoin rejoin{options_.id, options_.group, *record_, applied_, options_.ticket};
  // The log contains these too, and there may be very many of them.
  rejoin.record.aborted.clear();
  rejoin.record.departures.clear();
  return rejoin;
}

std::vector<wire::LogPart> Session::log_parts() const {
  std::vector<wire::LogPart> parts;
  for (auto& entries : wire::in_parts(std::vector<wire::LogEntry>(log_.begin(), log_.end())))
    parts.push_back({std::move(entries), false});
  if (parts.empty()) parts.emplace_back();
  parts.back().last = true;
  return parts;
}

void Session::request_admission() {
  options_.waiting = true;
  options_.start_only = false;
  if (!member()) say(wire::RequestAdmission{});
}

void Session::withdraw_admission() {
  options_.waiting = false;
  if (!member()) say(wire::WithdrawAdmission{});
}

void Session::report(const std::vector<wire::OpState>& states) {
  if (states.empty() || !welcomed_) return;
  for (auto& part : wire::in_parts(states)) say(wire::OpReport{std::move(part)});
}

void Session::report_link(const PeerId& peer, wire::LinkState state, const std::string& reason) {
  say(wire::LinkReport{peer, state, record_ ? record_->epoch : 0, reason});
}

void Session::leave(const std::string& reason) {
  say(wire::Leave{reason});
  open_ = false;
}

void Session::neighbourhood(wire::Neighbourhood neighbours) {
  neighbourhood_ = std::move(neighbours);
  say(*neighbourhood_);
}

}  // namespace pccl::peer
