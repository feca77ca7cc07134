#include "pccl/peer/session.h"

#include <algorithm>
#include <utility>

#include "pccl/topology/plan.h"

namespace pccl::peer {
namespace {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace

Error loss_error(const wire::EpochRecord& record) {
  Error error{Code::peer_lost, {}, {}, {}};
  for (const wire::Departure& gone : record.departures) {
    if (!error.reason.empty()) error.reason += "; ";
    if (gone.id.empty()) {
      error.reason += gone.reason;
    } else {
      error.reason += "peer " + gone.id.brief() + " is out: " + gone.reason;
      if (error.peer.empty()) error.peer = gone.id;
    }
  }
  return error;
}

// Between Rejoin and Welcome nothing else is said: a restarted master does not know us yet. What
// changes meanwhile is said again on Welcome.
void Session::say(const wire::Message& message) {
  const bool first = std::holds_alternative<wire::Join>(message) ||
                     std::holds_alternative<wire::Rejoin>(message) ||
                     std::holds_alternative<wire::LogPart>(message);
  if (!open_ || (!welcomed_ && !first)) return;
  output_.push_back(wire::encode({run_, term_, applied_}, message));
}

void Session::on_open() {
  open_ = true;
  welcomed_ = false;
  broken_ = {};
  reader_ = wire::FrameReader();
  if (member()) {
    say(rejoin());
  } else {
    say(wire::Join{options_.id, options_.group, options_.min_peers, options_.waiting,
                   options_.start_only, options_.addresses, options_.software, options_.order,
                   options_.word, options_.replica, options_.ranks_per_replica, options_.ticket});
  }
}

void Session::on_lost() {
  open_ = false;
  welcomed_ = false;
  output_.clear();
}

void Session::say_again() {
  // Asked for between the Join of this connection and its answer.
  if (!member() && options_.waiting && !options_.start_only) say(wire::RequestAdmission{});
  for (const wire::Message& message : open_calls()) say(message);
  for (const auto& [key, request] : aborts_) say(request);
  // Also that there is nobody any more.
  if (neighbourhood_) say(*neighbourhood_);
}

Status Session::on_bytes(std::span<const std::uint8_t> bytes) {
  reader_.feed(bytes);
  wire::Frame frame;
  while (open_) {
    const Result<bool> got = reader_.next(frame);
    if (!got) return got.error();
    if (!*got) break;
    on_frame(frame);
    if (!broken_) return broken_;
  }
  return {};
}

void Session::on_frame(const wire::Frame& frame) {
  if (frame.envelope.term < term_) return;  // a master that was replaced
  if (joined_ && member() && frame.envelope.run != run_ &&
      !std::holds_alternative<wire::Refused>(frame.message)) {
    broken_ = Status(Code::refused, "the master speaks of another run");
    return;
  }
  run_ = frame.envelope.run;
  term_ = frame.envelope.term;
  if (frame.envelope.ordinal > collected_) {
    collected_ = std::min(frame.envelope.ordinal, applied_);
    while (!log_.empty() && log_.front().ordinal <= collected_) log_.pop_front();
  }
  std::visit(
      Overloaded{
          [&](const wire::Welcome& welcome) {
            const bool again = joined_;
            joined_ = true;
            welcomed_ = true;
            if (again) say_again();
            host_.on_welcome(welcome, again);
          },
          [&](const wire::Refused& refused) {
            // Of a call that the members make differently, this peer is the odd one.
            const bool odd = refused.code == Code::mismatched_call;
            host_.on_refused({refused.code, refused.reason, odd ? options_.id : PeerId{}, {}});
          },
          [&](const wire::Log& log) {
            for (const wire::LogEntry& entry : log.entries) {
              broken_ = apply(entry);
              if (!broken_) return;
            }
          },
          [&](const wire::RequestLog&) {
            if (!member() || welcomed_) {
              broken_ = Status(Code::refused, "the master asks for a log that is not due");
              return;
            }
            for (const wire::LogPart& part : log_parts()) say(part);
          },
          [&](const wire::Prepare& prepare) { host_.on_prepare(prepare); },
          [&](const wire::Expect& expect) { host_.on_expect(expect); },
          [&](const wire::Notice& notice) { host_.on_notice(notice.text); },
          [&](const wire::Try& question) { host_.on_try(question); },
          [&](const wire::Relay& relay) { host_.on_relay(relay); },
          [&](const wire::Heartbeat&) {},
          [&](const auto&) {
            broken_ = Status(Code::refused, "a message that masters do not send");
          },
      },
      frame.message);
}

Status Session::apply(const wire::LogEntry& entry) {
  if (member()) {
    if (entry.ordinal <= applied_) return {};  // sent again after a reconnect
    if (entry.ordinal != applied_ + 1)
      return Status(Code::refused, "the master skipped entries of the log");
  } else if (!std::holds_alternative<wire::EpochRecord>(entry.what)) {
    return Status(Code::refused, "the log of a newcomer must begin with an epoch");
  }
  if (const auto* epoch = std::get_if<wire::EpochRecord>(&entry.what)) {
    const bool in = std::any_of(epoch->members.begin(), epoch->members.end(),
                                [&](const wire::Member& m) { return m.id == options_.id; });
    if (!in || !topology::valid(epoch->plan, epoch->members.size()))
      return Status(Code::refused, "the master sent an epoch that makes no sense");
    if (const Status relays = wire::check_relays(*epoch); !relays) {
      return Status(Code::refused,
                    "the master sent an epoch that makes no sense: " + relays.error().reason);
    }
  }
  applied_ = entry.ordinal;
  log_.push_back(entry);
  std::visit(Overloaded{
                 [&](const wire::EpochRecord& epoch) {
                   record_ = std::make_shared<const wire::EpochRecord>(epoch);
                   if (epoch.cause == wire::Cause::admission) {
                     operations_.clear();
                     rounds_.clear();
                     aborts_.clear();
                     covering_.clear();
                   }
                   for (const wire::OpKey& key : epoch.aborted) {
                     operations_.erase(key);
                     aborts_.erase(key);
                     covering_[key] = {loss_error(epoch), record_};
                   }
                   host_.on_epoch(record_);
                 },
                 [&](const wire::Verdict& verdict) {
                   operations_.erase(verdict.key);
                   aborts_.erase(verdict.key);
                   if (verdict.code != Code::ok) {
                     covering_[verdict.key] = {
                         {verdict.code, verdict.reason, verdict.culprit, verdict.waiting}, record_};
                   }
                   host_.on_verdict(verdict);
                 },
                 [&](const wire::Outcome& outcome) {
                   rounds_.erase(outcome.key);
                   aborts_.erase(outcome.key);
                   if (wire::changes_record(outcome, *record_)) {
                     auto record = std::make_shared<wire::EpochRecord>(*record_);
                     wire::apply(outcome, *record);
                     record_ = std::move(record);
                   }
                   if (outcome.code != Code::ok) {
                     covering_[outcome.key] = {
                         {outcome.code, outcome.reason, outcome.culprit, outcome.waiting}, record_};
                   }
                   host_.on_outcome(outcome);
                 },
             },
             entry.what);
  return {};
}

std::optional<Covering> Session::take_covering(const wire::CallKey& key) {
  const auto it = covering_.find(key);
  if (it == covering_.end()) return std::nullopt;
  Covering covering = std::move(it->second);
  covering_.erase(it);
  return covering;
}

wire::Rejoin Session::rejoin() const {
  wire::Rejoin rejoin{options_.id, options_.group, *record_, applied_, options_.ticket};
  // The log has these, too, and there may be very many of them.
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

std::vector<wire::Message> Session::open_calls() const {
  std::vector<wire::OpState> states;
  for (const auto& [key, state] : operations_) states.push_back(state);
  std::vector<wire::Message> messages;
  for (auto& part : wire::in_parts(std::move(states)))
    messages.emplace_back(wire::OpReport{std::move(part)});
  for (const auto& [key, payload] : rounds_)
    messages.emplace_back(wire::EnterRound{{key, payload}});
  return messages;
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

void Session::prepared(std::uint64_t epoch, const std::vector<PeerId>& without) {
  say(wire::Prepared{epoch, without});
}

void Session::enter(const wire::RoundKey& key, wire::RoundPayload payload) {
  say(wire::EnterRound{{key, payload}});
  rounds_[key] = std::move(payload);
}

void Session::report(const std::vector<wire::OpState>& states) {
  if (states.empty()) return;
  for (const wire::OpState& state : states) operations_[state.key] = state;
  if (!welcomed_) return;
  for (auto& part : wire::in_parts(states)) say(wire::OpReport{std::move(part)});
}

void Session::request_abort(const wire::CallKey& key, Code code, const PeerId& lost) {
  const wire::AbortRequest request{key, code, lost};
  aborts_[key] = request;
  say(request);
}

void Session::report_link(const PeerId& peer, wire::LinkState state, const std::string& reason) {
  say(wire::LinkReport{peer, state, record_ ? record_->epoch : 0, reason});
}

void Session::measured(const wire::Measurements& row) { say(wire::Measured{row}); }

void Session::tried(std::uint64_t number, bool reached, const std::string& reason) {
  say(wire::Tried{number, reached, reason});
}

void Session::want_relay(const PeerId& peer, std::uint32_t stripes) {
  say(wire::WantRelay{peer, stripes});
}

void Session::blocked(const wire::Blocked& blocked) { say(blocked); }

void Session::leave(const std::string& reason) {
  say(wire::Leave{reason});
  open_ = false;
}

void Session::neighbourhood(wire::Neighbourhood neighbours) {
  neighbourhood_ = std::move(neighbours);
  say(*neighbourhood_);
}

void Session::heartbeat() { say(wire::Heartbeat{}); }

}  // namespace pccl::peer
