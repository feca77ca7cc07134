#include "pccl/master/master.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "pccl/digest/ticket.h"
#include "pccl/topology/plan.h"
#include "pccl/wire/address.h"

#ifndef PCCL_VERSION
#define PCCL_VERSION "unknown"
#endif

namespace pccl::master {
namespace {

constexpr const char* kSoftware = "pccl " PCCL_VERSION;
// Of those who ask whether they could join:
constexpr std::size_t kMaxQuestions = 4;  // at a time
constexpr Rate kQuestions{16, 1};         // of all of them
constexpr std::size_t kMaxAsked = 4;      // members, for each
constexpr unsigned kMaxInquiries = 8;     // on one connection
constexpr std::size_t kMaxShown = 16;     // members
constexpr Duration kQuestionTime = std::chrono::milliseconds(2500);

// How long a restarted master waits for more members once a majority has come back.
constexpr Duration kRecoveryGrace = std::chrono::seconds(1);
constexpr std::size_t kMaxGroups = 65536;
// Members that have come back to a master without memory, until their groups are brought back: what
// they report is kept.
constexpr std::size_t kMaxRecovering = 4096;
constexpr std::size_t kMaxReported = 128 << 20;  // bytes
// Epochs and ordinals count up from what is reported, and must not come round.
constexpr std::uint64_t kMaxCount = std::uint64_t{1} << 62;
// Nor must terms. One more comes with each restart; a member of this run may have met a master that
// another one replaced before we heard of it, but not many of them.
constexpr std::uint32_t kMaxTerm = std::uint32_t{1} << 31;
constexpr std::uint32_t kMaxTermsAhead = 16;

bool plausible(const wire::EpochRecord& record, const Options& options) {
  std::set<PeerId> ids;
  for (const wire::Member& member : record.members) {
    if (member.id.empty() || !ids.insert(member.id).second || member.joined > kMaxCount)
      return false;
  }
  return !ids.empty() && ids.size() <= options.limits.max_peers && record.epoch <= kMaxCount &&
         record.points <= kMaxCount && topology::valid(record.plan, ids.size());
}

Status wrong_report(const PeerId& id, const std::string& what) {
  return Status(Code::evicted,
                "what peer " + id.brief() + " reports does not hold together" + what);
}

// What a member says that it knows holds together; whether it is true, nobody can tell. A master
// without memory passes it on to the others.
Status check(const wire::Rejoin& rejoin, const Options& options) {
  const auto& members = rejoin.record.members;
  const PeerId seal = digest::seal_of(rejoin.ticket);
  const bool member = std::any_of(members.begin(), members.end(), [&](const auto& known) {
    return known.id == rejoin.id && known.seal == seal;
  });
  if (!member || !plausible(rejoin.record, options) || rejoin.applied > kMaxCount)
    return wrong_report(rejoin.id, "");
  if (const Status relays = wire::check_relays(rejoin.record); !relays)
    return wrong_report(rejoin.id, ": " + relays.error().reason);
  return {};
}

// Its log, once all of it has come: entries one after the other, up to the last one it has applied.
Status check_log(const wire::Rejoin& rejoin, const std::vector<wire::LogEntry>& log,
                 const Options& options) {
  if (log.size() > rejoin.applied) return wrong_report(rejoin.id, "");
  std::uint64_t ordinal = rejoin.applied - log.size();
  for (const wire::LogEntry& entry : log) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    if (entry.ordinal != ++ordinal || (record != nullptr && !plausible(*record, options)))
      return wrong_report(rejoin.id, "");
    if (record == nullptr) continue;
    if (const Status relays = wire::check_relays(*record); !relays)
      return wrong_report(rejoin.id, ": " + relays.error().reason);
  }
  return {};
}

}  // namespace

const Group* Master::group(std::uint32_t id) const {
  const auto it = groups_.find(id);
  return it == groups_.end() ? nullptr : it->second.get();
}

Group& Master::group_for(std::uint32_t id) {
  auto& group = groups_[id];
  if (!group) group.reset(new Group(id, options_, *this));
  return *group;
}

bool Master::anonymous(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  return it == connections_.end() || (!it->second.group && !it->second.recovers);
}

bool Master::member(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  if (it == connections_.end() || !it->second.group) return false;
  const Group* known = group(*it->second.group);
  return known != nullptr && !known->member_on(connection).empty();
}

bool Master::may_be_long(ConnectionId connection) const {
  const auto it = connections_.find(connection);
  return (it != connections_.end() && it->second.asked) || member(connection);
}

// Nobody was ever let in: there is nothing to remember of it.
void Master::forget_group(std::uint32_t id) {
  const auto it = groups_.find(id);
  if (it != groups_.end() && it->second->empty() && it->second->record().epoch == 0)
    groups_.erase(it);
}

// Groups that everybody has left are kept for who comes late, as long as there is room.
bool Master::make_room_for_group() {
  if (groups_.size() < kMaxGroups) return true;
  std::erase_if(groups_, [](const auto& item) { return item.second->empty(); });
  return groups_.size() < kMaxGroups;
}

Duration Master::tick() const {
  Duration tick =
      std::min<Duration>(options_.heartbeat_interval / 2, std::chrono::milliseconds(500));
  for (const auto& [id, group] : groups_) {
    if (group->hurried()) tick = std::min<Duration>(tick, std::chrono::milliseconds(50));
  }
  return tick;
}

void Master::send(ConnectionId to, std::uint64_t collected, const wire::Message& message) {
  const auto it = connections_.find(to);
  if (it == connections_.end() || it->second.closing) return;
  actions_.emplace_back(Send{to, wire::encode({run_, term_, collected}, message)});
}

void Master::close(ConnectionId connection) {
  const auto it = connections_.find(connection);
  if (it == connections_.end() || it->second.closing) return;
  it->second.closing = true;
  actions_.emplace_back(Close{connection});
}

void Master::refuse(ConnectionId connection, Code code, const std::string& reason) {
  send(connection, 0, wire::Refused{code, reason});
  close(connection);
}

wire::Census Master::census() {
  wire::Census census;
  for (const auto& [id, group] : groups_) {
    const auto size = static_cast<std::uint32_t>(group->record().members.size());
    if (size == 0) continue;
    census.members += size;
    ++census.groups;
    census.largest_group = std::max(census.largest_group, size);
  }
  return census;
}

std::optional<std::pair<PeerId, PeerId>> Master::expect_relay(const PeerId& one,
                                                              const PeerId& other) {
  const std::pair<PeerId, PeerId> tokens{PeerId::random(), PeerId::random()};
  actions_.emplace_back(ExpectRelay{one, other, tokens.first, tokens.second});
  return tokens;
}

void Master::on_connect(ConnectionId connection, const std::string& address, Instant now) {
  Connection& made = connections_[connection];
  made.address = address;
  made.since = now;
}

void Master::on_disconnect(ConnectionId id, Instant now) {
  const auto it = connections_.find(id);
  if (it == connections_.end()) return;
  const std::optional<std::uint32_t> group = it->second.group;
  questions_.erase(it->second.question);
  connections_.erase(it);
  forget_report(id);
  if (!group) return;
  const auto found = groups_.find(*group);
  if (found != groups_.end()) found->second->on_disconnect(id, now);
  settle_replicas(now);
  forget_group(*group);
}

// What an event in one group means for the others; before anything of it is sent.
void Master::settle_replicas(Instant now) {
  const auto recovery = recoveries_.begin();
  const bool more = recovery != recoveries_.end() && recovery->first < replicas_.ranks();
  replicas_.settle(more, now);
}

void Master::on_garbage(ConnectionId id, const Error& error, Instant now) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.closing) return;
  const std::string text = "connection from " + it->second.address + " refused: " + error.reason;
  if (const auto line = rare_.line(text, now)) log(*line);
  if (it->second.group) {
    group_for(*it->second.group).evict(id, Code::evicted, "protocol misuse: " + error.reason, now);
  }
  refuse(id, Code::refused, error.reason);
  settle_replicas(now);
}

void Master::on_frame(ConnectionId id, const wire::Frame& frame, Instant now) {
  const auto it = connections_.find(id);
  if (it == connections_.end() || it->second.closing) return;
  Connection& connection = it->second;
  if (connection.group) {
    if (frame.envelope.run != run_) {
      return on_garbage(id, {Code::refused, "a message of another run", {}, {}}, now);
    }
    const auto found = groups_.find(*connection.group);
    if (found != groups_.end()) {
      found->second->on_message(id, frame, now);
      const auto* const tried = std::get_if<wire::Tried>(&frame.message);
      if (tried != nullptr) on_tried(found->second->member_on(id), *tried, now);
    }
    return settle_replicas(now);
  }
  if (const auto* first = std::get_if<wire::Join>(&frame.message)) {
    // A newcomer of a run that this master (restarted) does not know yet: it shall come again when
    // the members are back, rather than found a run of its own here. The same while they come back.
    if (frame.envelope.run != 0 && frame.envelope.run != run_) return close(id);
    if (recoveries_.contains(first->group)) return close(id);
    if (replicas_.recovering() && !groups_.contains(first->group)) return close(id);
    join(id, connection, *first, now);
    return settle_replicas(now);
  }
  if (std::holds_alternative<wire::Rejoin>(frame.message)) {
    rejoin(id, connection, frame, now);
    return settle_replicas(now);
  }
  if (const auto* part = std::get_if<wire::LogPart>(&frame.message); part && connection.asked) {
    log_part(id, connection, *part, now);
    return settle_replicas(now);
  }
  if (const auto* inquiry = std::get_if<wire::Inquiry>(&frame.message))
    return inquire(id, connection, *inquiry, now);
  on_garbage(id, {Code::refused, "the first message must be Join or Rejoin", {}, {}}, now);
}

// That address is to this member the same host as to us, who saw it. (Who comes by loopback is on
// our own.)
bool Master::may_try(ConnectionId member, const std::string& address) const {
  const auto it = connections_.find(member);
  if (it == connections_.end()) return false;
  const wire::Reach theirs = wire::reach_of(it->second.address);
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

// Only the address that the question comes from is tried, once per connection and few at a time: so
// nobody can have others looked for open ports.
void Master::inquire(ConnectionId id, Connection& connection, const wire::Inquiry& inquiry,
                     Instant now) {
  if (connection.closing) return;
  if (connection.question != 0) return refuse(id, Code::refused, "one question at a time");
  // An answer is far longer than what asks for it.
  if (++connection.inquiries > kMaxInquiries)
    return refuse(id, Code::refused, "too many questions");
  connection.since = now;  // each takes a round trip, and some of them a try at its address
  wire::Findings findings;
  findings.software = kSoftware;
  findings.seen = connection.address;
  findings.relays = options_.relays;
  const auto group = groups_.find(inquiry.group);
  if (group != groups_.end()) {
    const std::vector<wire::Member>& members = group->second->record().members;
    findings.size = static_cast<std::uint32_t>(members.size());
    for (const wire::Member& member : members) {
      if (findings.members.size() >= kMaxShown) break;
      findings.members.push_back({member.id, member.joined, member.addresses, {}, member.replica});
    }
  }
  if (inquiry.port == 0) return send(id, 0, findings);
  if (questions_.size() >= kMaxQuestions || !attempts_.take(kQuestions, now)) {
    findings.attempt.reached = wire::Reached::busy;
    return send(id, 0, findings);
  }
  const std::uint64_t number = connection.question = next_question_++;
  const wire::Address address{connection.address, inquiry.port};
  actions_.emplace_back(TryAddress{id, address});
  if (group != groups_.end()) {
    const auto fit = [&](ConnectionId member) { return may_try(member, address.host); };
    for (const PeerId& peer : group->second->ask_members({number, address}, kMaxAsked, fit))
      findings.attempts.push_back({peer, wire::Reached::not_tried, {}});
  }
  questions_[number] = {id, now + kQuestionTime, std::move(findings)};
  const std::string text = "connection from " + connection.address + " asks who reaches its port " +
                           std::to_string(inquiry.port);
  if (const auto line = rare_.line(text, now)) log(*line);
}

void Master::on_tried(ConnectionId for_whom, bool reached, const std::string& reason, Instant now) {
  for (auto& [number, question] : questions_) {
    if (question.from != for_whom) continue;
    question.findings.attempt = {{}, reached ? wire::Reached::yes : wire::Reached::no, reason};
  }
  answer_questions(now);
}

void Master::on_tried(const PeerId& peer, const wire::Tried& tried, Instant now) {
  const auto it = questions_.find(tried.number);
  if (it == questions_.end()) return;
  for (wire::Attempt& attempt : it->second.findings.attempts) {
    if (attempt.peer != peer || attempt.reached != wire::Reached::not_tried) continue;
    attempt.reached = tried.reached ? wire::Reached::yes : wire::Reached::no;
    attempt.reason = tried.reason.substr(0, 200);
  }
  answer_questions(now);
}

// Those of which all is known, or whose time is over.
void Master::answer_questions(Instant now) {
  for (auto it = questions_.begin(); it != questions_.end();) {
    const wire::Findings& findings = it->second.findings;
    const bool all = findings.attempt.reached != wire::Reached::not_tried &&
                     std::none_of(findings.attempts.begin(), findings.attempts.end(),
                                  [](const wire::Attempt& attempt) {
                                    return attempt.reached == wire::Reached::not_tried;
                                  });
    if (!all && now < it->second.until) {
      ++it;
      continue;
    }
    const auto connection = connections_.find(it->second.from);
    if (connection != connections_.end() && !connection->second.closing)
      send(it->second.from, 0, findings);
    it = questions_.erase(it);
  }
}

void Master::join(ConnectionId id, Connection& connection, const wire::Join& join, Instant now) {
  if (!groups_.contains(join.group) && !make_room_for_group()) {
    return refuse(id, Code::refused, "too many groups");
  }
  if (const std::string why_not = replicas_.objection(join); !why_not.empty())
    return refuse(id, Code::refused, why_not);
  wire::Join seen = join;
  // The address this connection comes from is one more way to reach the peer; most likely the best
  // one.
  if (!join.addresses.empty()) {
    const wire::Address source{connection.address, join.addresses.front().port};
    std::erase(seen.addresses, source);
    seen.addresses.insert(seen.addresses.begin(), source);
  }
  connection.group = join.group;
  group_for(join.group).add_candidate(id, seen, connection.address, now);
}

// To a group that is there.
void Master::return_to(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                       const std::vector<wire::LogEntry>* log, Instant now) {
  connection.group = rejoin.group;
  switch (groups_.at(rejoin.group)->rejoin(id, rejoin, log, now)) {
    case Group::Return::in:
      return;
    case Group::Return::needs_log:
      connection.group.reset();
      return ask_for_log(id, connection, rejoin, now);
    case Group::Return::out:
      connection.group.reset();
      return refuse(id, Code::evicted, "the run went on without this peer");
  }
}

// A member has one deadline for its log, however often it comes back: the others wait for it.
void Master::ask_for_log(ConnectionId id, Connection& connection, const wire::Rejoin& rejoin,
                         Instant now) {
  Returned report(id, rejoin);
  const auto recovery = recoveries_.find(rejoin.group);
  const Instant since = recovery == recoveries_.end()
                            ? now
                            : recovery->second.asked.try_emplace(report.seat(), now).first->second;
  for (const auto& [other, earlier] : connections_) {
    if (other != id && earlier.asked && earlier.asked->report.seat() == report.seat()) close(other);
  }
  connection.recovers = true;
  connection.asked = AskedLog{std::move(report), rejoin.group, since, {}, 0, 0, false};
  send(id, 0, wire::RequestLog{});
}

void Master::log_part(ConnectionId id, Connection& connection, const wire::LogPart& part,
                      Instant now) {
  AskedLog& asked = *connection.asked;
  const std::uint32_t group = asked.group;
  const auto refused = [&](const Status& why) {
    refuse(id, why.error().code, why.error().reason);
    forget_report(id);
    recover_if_ready(group, now);
  };
  const PeerId& who = asked.report.seat().first;
  if (asked.complete || (part.entries.empty() && !part.last)) return refused(wrong_report(who, ""));
  if (asked.entries + part.entries.size() > options_.limits.max_behind + 1)
    return refused(wrong_report(who, ": its log is too long"));
  wire::Bytes bytes;
  wire::Writer writer(bytes);
  writer(part);
  if (reported_bytes({}) + bytes.size() > kMaxReported) {
    if (const auto line = rare_.line("too many members come back at the same time", now))
      log(*line);
    return close(id);  // it tries again
  }
  asked.bytes += bytes.size();
  asked.entries += part.entries.size();
  asked.parts.push_back(std::move(bytes));
  if (!part.last) return;
  asked.complete = true;
  const wire::Rejoin rejoin = asked.report.rejoin();
  const std::vector<wire::LogEntry> entries = asked.log();
  if (const Status sound = check_log(rejoin, entries, options_); !sound) return refused(sound);
  if (recoveries_.contains(group)) return recover_if_ready(group, now);
  connection.asked.reset();
  connection.recovers = false;
  if (groups_.contains(group)) return return_to(id, connection, rejoin, &entries, now);
  close(id);  // the group has ended meanwhile; it comes again
}

std::vector<wire::LogEntry> Master::AskedLog::log() const {
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

void Master::rejoin(ConnectionId id, Connection& connection, const wire::Frame& frame,
                    Instant now) {
  const auto& rejoin = std::get<wire::Rejoin>(frame.message);
  if (connection.recovers)
    return on_garbage(id, {Code::refused, "it has come back already", {}, {}}, now);
  if (const Status sound = check(rejoin, options_); !sound)
    return refuse(id, sound.error().code, sound.error().reason);
  // (One of an earlier term, too, which a master that another one replaced has led since.)
  const bool same_run = frame.envelope.run == run_;
  const bool known = groups_.contains(rejoin.group);
  if (same_run && frame.envelope.term == term_ && known)
    return return_to(id, connection, rejoin, nullptr, now);
  // Another master's member. It is welcome if this one has no run of its own yet and follows that
  // term.
  if (!same_run && !groups_.empty()) {
    return refuse(id, Code::evicted, "this master serves another run");
  }
  if (frame.envelope.term > (same_run ? term_ + kMaxTermsAhead : kMaxTerm)) {
    return refuse(id, Code::evicted,
                  "peer " + rejoin.id.brief() + " reports a master of term " +
                      std::to_string(frame.envelope.term) + ", and this one has term " +
                      std::to_string(term_));
  }
  if (known) return return_to(id, connection, rejoin, nullptr, now);
  if (const std::string why_not = replicas_.objection(rejoin); !why_not.empty())
    return refuse(id, Code::evicted, why_not);
  Returned returned(id, rejoin);
  const auto open = recoveries_.find(rejoin.group);
  if (open != recoveries_.end()) {
    for (const Returned& other : open->second.reports)
      if (returned.share(other)) break;
  }
  if (!room_for(returned)) {
    if (const auto line = rare_.line("too many members come back at the same time", now))
      log(*line);
    return close(id);  // it tries again
  }
  if (!same_run) {
    if (!recoveries_.empty()) return refuse(id, Code::evicted, "this master serves another run");
    run_ = frame.envelope.run;
  }
  term_ = std::max(term_, frame.envelope.term + 1);
  replicas_.recover(rejoin.record.ranks_per_replica, now);
  Recovery& recovery = recoveries_[rejoin.group];
  if (recovery.reports.empty()) recovery.since = now;
  const auto asked = recovery.asked.find(returned.seat());
  if (asked != recovery.asked.end() && now - asked->second >= kHandshakeTimeout)
    return refuse(id, Code::evicted, "its log did not come within the handshake timeout");
  // It has come again before we noticed that it was gone. (Another one of that id may be an
  // impostor, or this one is: who has the right ticket is seen when the group is brought back.)
  for (const Returned& before : recovery.reports)
    if (before.seat() == returned.seat()) close(before.connection());
  std::erase_if(recovery.reports,
                [&](const Returned& before) { return before.seat() == returned.seat(); });
  recovery.reports.push_back(std::move(returned));
  connection.recovers = true;
  for (const wire::Member& member : rejoin.record.members) joins_ = std::max(joins_, member.joined);
  recover_if_ready(rejoin.group, now);
}

// Bytes held for reports of groups that are not back yet, except those of `without`.
std::size_t Master::reported_bytes(const Seat& without) const {
  std::size_t bytes = 0;
  std::set<const void*> records;
  for (const auto& [group, recovery] : recoveries_) {
    for (const Returned& one : recovery.reports) {
      if (one.seat() == without) continue;
      if (records.insert(one.record()).second) bytes += one.record_bytes();
    }
  }
  for (const auto& [id, connection] : connections_)
    if (connection.asked)
      bytes += connection.asked->bytes + connection.asked->report.record_bytes();
  return bytes;
}

bool Master::room_for(const Returned& more) const {
  std::size_t count = 1;
  bool shared = false;
  for (const auto& [group, recovery] : recoveries_) {
    for (const Returned& one : recovery.reports) {
      if (one.seat() == more.seat()) continue;  // it takes that one's place
      ++count;
      shared = shared || one.record() == more.record();
    }
  }
  const std::size_t bytes = shared ? 0 : more.record_bytes();
  return count <= kMaxRecovering && reported_bytes(more.seat()) + bytes <= kMaxReported;
}

void Master::forget_report(ConnectionId id) {
  for (auto& [group_id, recovery] : recoveries_) {
    std::erase_if(recovery.reports, [&](const Returned& one) { return one.connection() == id; });
  }
  std::erase_if(recoveries_, [](const auto& item) { return item.second.reports.empty(); });
}

// A group is rebuilt when a majority of its last epoch is back, at once when all are; and when the
// one that knows most has said its log.
void Master::recover_if_ready(std::uint32_t group_id, Instant now) {
  const auto it = recoveries_.find(group_id);
  if (it == recoveries_.end()) return;
  Recovery& recovery = it->second;
  const Returned* last = nullptr;
  std::set<Seat> seats;
  for (const Returned& one : recovery.reports) {
    if (last == nullptr || one.at().first > last->at().first) last = &one;
    seats.insert(one.seat());
  }
  const std::vector<Seat>& members = last->members();
  const auto back = static_cast<std::size_t>(std::count_if(
      members.begin(), members.end(), [&](const Seat& seat) { return seats.contains(seat); }));
  const std::size_t all = members.size();
  if (back * 2 <= all && now - recovery.since >= options_.reconnect_timeout) {
    // The others will not come any more, and newcomers shall not wait for them for ever.
    log("group " + std::to_string(group_id) + ": only " + std::to_string(back) + " of " +
        std::to_string(all) + " members came back; that run is over");
    const auto reports = std::move(recovery.reports);
    recoveries_.erase(it);
    for (const Returned& one : reports) {
      refuse(one.connection(), Code::evicted,
             "too few members of the run came back to the restarted master");
    }
    if (groups_.empty() && recoveries_.empty()) run_ = own_run_;
    return;
  }
  if (back * 2 <= all || (back < all && now - recovery.since < kRecoveryGrace)) return;
  const Returned& best = newest(recovery.reports);
  Connection& source = connections_.at(best.connection());
  if (!source.asked) return ask_for_log(best.connection(), source, best.rejoin(), now);
  if (!source.asked->complete) return;
  const std::vector<wire::LogEntry> entries = source.asked->log();
  const std::vector<Returned> reports = std::move(recovery.reports);
  recoveries_.erase(it);
  for (const Returned& one : reports) {
    Connection& connection = connections_.at(one.connection());
    connection.group = group_id;
    connection.recovers = false;
    connection.asked.reset();
  }
  log("group " + std::to_string(group_id) + ": brought back from the reports of " +
      std::to_string(back) + " of " + std::to_string(all) + " members");
  // Only then in the list: while it is made, it asks us for the census.
  auto group = Group::rebuild(group_id, options_, *this, reports, entries, now);
  groups_[group_id] = std::move(group);
}

void Master::on_time(Instant now) {
  std::vector<ConnectionId> mute;
  std::vector<ConnectionId> silent;
  for (const auto& [id, connection] : connections_) {
    if (!connection.group && !connection.closing && !connection.recovers &&
        now - connection.since >= kHandshakeTimeout) {
      mute.push_back(id);
    }
    if (connection.asked && !connection.asked->complete && !connection.closing &&
        now - connection.asked->since >= kHandshakeTimeout) {
      silent.push_back(id);
    }
  }
  for (const ConnectionId id : silent) {
    refuse(id, Code::evicted, "its log did not come within the handshake timeout");
    forget_report(id);
  }
  for (const ConnectionId id : mute) {
    refuse(id, Code::refused, "no Join within the handshake timeout");
  }
  std::vector<std::uint32_t> recovering;
  for (const auto& [id, recovery] : recoveries_) recovering.push_back(id);
  for (const std::uint32_t id : recovering) recover_if_ready(id, now);
  for (const auto& [id, group] : groups_) group->on_time(now);
  replicas_.on_time(now);
  settle_replicas(now);
  answer_questions(now);
  if (now - last_heartbeat_ >= options_.heartbeat_interval) {
    last_heartbeat_ = now;
    for (const auto& [id, connection] : connections_) {
      if (!connection.group) continue;
      const auto group = groups_.find(*connection.group);
      if (group != groups_.end()) send(id, group->second->log().collected(), wire::Heartbeat{});
    }
  }
}

}  // namespace pccl::master
