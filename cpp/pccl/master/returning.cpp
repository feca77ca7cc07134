#include "pccl/master/returning.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "pccl/master/quorum.h"
#include "pccl/master/reports.h"

namespace pccl::master {
namespace {

// How long members wait for the entries that only one of them lacks, before it is put out. Those
// that wait for a master go to the next one after kPatience (peer/control_connection.h).
constexpr Duration kPrefixPatience = std::chrono::milliseconds(500);

// Calls `look` with every report that waits here.
template <class Look>
void each_report(const Returning& returning, const Look& look) {
  for (const auto* waiting : {&returning.recoveries, &returning.appeals}) {
    for (const auto& [group, recovery] : *waiting) std::ranges::for_each(recovery.reports, look);
  }
  for (const auto& [id, former] : returning.formers) look(former.report);
}

}  // namespace

std::pair<std::size_t, std::size_t> count_back(const std::vector<Returned>& reports) {
  const Returned* last = nullptr;
  std::set<Seat> seats;
  for (const Returned& one : reports) {
    if (last == nullptr || one.at().first > last->at().first) last = &one;
    seats.insert(one.seat());
  }
  const std::vector<Seat>& members = last->members();
  const auto back =
      std::ranges::count_if(members, [&](const Seat& seat) { return seats.contains(seat); });
  return {static_cast<std::size_t>(back), members.size()};
}

// -- reports

// Memory of the reports of members that wait, except the report of `without`.
std::size_t Returning::reported_bytes(const Seat& without) const {
  std::size_t bytes = 0;
  std::set<const void*> records;
  each_report(*this, [&](const Returned& one) {
    if (one.seat() != without && records.insert(one.record()).second) bytes += one.record_bytes();
  });
  for (const auto& [id, connection] : connections_.all()) {
    if (connection.asked)
      bytes += connection.asked->bytes + connection.asked->report.record_bytes();
    if (connection.promise && connection.promise->accepted &&
        records.insert(connection.promise->accepted.get()).second)
      bytes += connection.promise->accepted->bytes();
  }
  return bytes;
}

bool Returning::too_many_bytes(std::size_t more) const {
  return reported_bytes({}) + more > options_.limits.max_reported_bytes;
}

bool Returning::admit(Returned& more) {
  std::size_t count = 1;
  bool shared = false;
  each_report(*this, [&](const Returned& one) {
    if (one.seat() == more.seat()) return;  // it will be replaced
    ++count;
    shared = shared || more.share(one);
  });
  const std::size_t bytes = shared ? 0 : more.record_bytes();
  const bool fits = count <= options_.limits.max_recovering &&
                    reported_bytes(more.seat()) + bytes <= options_.limits.max_reported_bytes;
  if (!fits) close_for_lack_of_room(more.connection());
  return fits;
}

void Returning::close_for_lack_of_room(ConnectionId id) {
  outbox_.log_rarely("too many members return at the same time");
  connections_.close(id);
}

// The member may have returned again before the master noticed that its connection was gone. (A
// report of the same id with another seal is kept: only the rebuilt group can tell which one is the
// member.)
void Returning::add(Recovery& recovery, const Returned& report) {
  std::erase_if(recovery.reports, [&](const Returned& before) {
    if (before.seat() != report.seat()) return false;
    connections_.close(before.connection());
    return true;
  });
  recovery.reports.push_back(report);
}

void Returning::forget(ConnectionId id) {
  const auto is_this = [&](const Returned& one) { return one.connection() == id; };
  for (auto& [group, recovery] : appeals) std::erase_if(recovery.reports, is_this);
  for (auto& [group, recovery] : recoveries) {
    std::erase_if(recovery.reports, is_this);
    recovery.changed = true;
  }
  const std::size_t ended =
      std::erase_if(recoveries, [](const auto& item) { return item.second.reports.empty(); });
  if (ended > 0) run_.quiet_since = outbox_.now();
  forget_run();
}

void Returning::forget_run() {
  if (!recoveries.empty()) return;
  if (options_.place.alone()) {
    if (served_.all().empty()) run_.id = run_.own;
    return;
  }
  if (!served_.over()) return;
  if (run_.id != run_.own) served_.clear();
  run_.id = run_.own;
  run_.admission_paused = false;
}

// -- logs

void Returning::return_to(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin,
                          const std::vector<wire::LogEntry>* log, Instant now) {
  const Quorum* const quorum = served_.quorum(rejoin.group);
  connection.group = rejoin.group;
  switch (served_.find(rejoin.group)->rejoin(id, rejoin, connection.term, log, now)) {
    case Group::Return::in:
      if (quorum != nullptr) served_.propose_to(id, *quorum);
      return;
    case Group::Return::needs_log:
      connection.group.reset();
      return ask_for_log(id, connection, rejoin, now);
    case Group::Return::out:
      connection.group.reset();
      // Its eviction may not be decided yet: it asks again, here or elsewhere.
      if (quorum != nullptr) {
        if (quorum->proposal() != nullptr) return connections_.close(id);
        connection.term = std::max(connection.term, quorum->term());
      }
      return connections_.refuse(id, Code::evicted, "the run went on without this peer");
  }
}

void Returning::ask_for_log(ConnectionId id, ControlPeer& connection, const wire::Rejoin& rejoin,
                            Instant now) {
  Returned report(id, rejoin);
  const auto recovery = recoveries.find(rejoin.group);
  const bool recovers = recovery != recoveries.end();
  const Instant since =
      recovers ? recovery->second.asked.try_emplace(report.seat(), now).first->second : now;
  for (const auto& [other, earlier] : connections_.all()) {
    if (other != id && earlier.asked && earlier.asked->report.seat() == report.seat())
      served_.close(other);
  }
  connection.recovers = true;
  connection.asked = AskedLog{std::move(report), rejoin.group, since, {}, 0, 0, false};
  const std::uint32_t term = recovers ? std::max(run_.term, recovery->second.term) : run_.term;
  connections_.send(id, term, 0, wire::RequestLog{});
}

// Whether its whole log is here; asks for it if nobody has.
bool Returning::has_log(ConnectionId id, const wire::Rejoin& rejoin, Instant now) {
  ControlPeer& connection = connections_.at(id);
  if (!connection.asked) ask_for_log(id, connection, rejoin, now);
  return connection.asked->complete;
}

// The member that was admitted first, of those whose log has the entry with this ordinal, of the
// epoch before `admission` or a later one. Logs agree up to the end of an epoch that both have.
// Null: there is none.
const Returned* Returning::provider(const Recovery& recovery, const wire::EpochRecord& admission,
                                    std::uint64_t ordinal, std::uint64_t last_epoch) const {
  const std::set<Seat> members = seats_of(admission);
  const Returned* first = nullptr;
  for (const Returned& one : recovery.reports) {
    const ControlPeer& connection = connections_.at(one.connection());
    // Several masters: one that has not promised may be gone.
    const bool here = !connection.closing && (recovery.term == 0 || connection.promise);
    const auto [epoch, applied] = one.at();
    if (!here || !members.contains(one.seat()) || applied < ordinal ||
        epoch + 1 < admission.epoch || epoch > last_epoch)
      continue;
    if (first == nullptr || one.place() < first->place()) first = &one;
  }
  return first;
}

std::optional<std::vector<wire::LogEntry>> Returning::whole_log(ConnectionId source,
                                                                const wire::Rejoin& last,
                                                                Recovery& recovery, Instant now) {
  if (!has_log(source, last, now)) return std::nullopt;
  std::vector<wire::LogEntry> log = connections_.at(source).asked->log();
  while (!log.empty()) {
    const auto* admission = std::get_if<wire::EpochRecord>(&log.front().what);
    if (admission == nullptr || admission->cause != wire::Cause::admission) break;
    const std::uint64_t before = log.front().ordinal - 1;
    const std::set<Seat> members = seats_of(last.record);
    const bool lacks = std::ranges::any_of(recovery.reports, [&](const Returned& one) {
      return one.at().second < before && members.contains(one.seat());
    });
    if (!lacks) break;
    const Returned* const other = provider(recovery, *admission, before, last.record.epoch);
    if (other == nullptr || other->connection() == source) break;
    if (!has_log(other->connection(), other->rejoin(), now)) {
      if (!recovery.prefix_due) recovery.prefix_due = now + kPrefixPatience;
      if (now < *recovery.prefix_due) return std::nullopt;
      break;
    }
    std::vector<wire::LogEntry> whole = connections_.at(other->connection()).asked->log();
    std::erase_if(whole, [&](const wire::LogEntry& entry) { return entry.ordinal > before; });
    if (whole.empty()) break;
    std::ranges::move(log, std::back_inserter(whole));
    log = std::move(whole);
  }
  return log;
}

bool Returning::on_log_part(ConnectionId id, ControlPeer& connection, const wire::LogPart& part,
                            Instant now) {
  AskedLog& asked = *connection.asked;
  const std::uint32_t group = asked.group;
  const auto refused = [&](const Status& why) {
    connections_.refuse(id, why.error().code, why.error().reason);
    forget(id);
    return true;
  };
  if (asked.complete || (part.entries.empty() && !part.last))
    return refused(wrong_report(name_of(asked.report.rejoin())));
  if (asked.entries + part.entries.size() > options_.limits.max_behind + 1)
    return refused(wrong_report(name_of(asked.report.rejoin()), ": its log is too long"));
  wire::Bytes bytes = wire::encoded(part);
  if (too_many_bytes(bytes.size())) {
    close_for_lack_of_room(id);
    return false;
  }
  asked.bytes += bytes.size();
  asked.entries += part.entries.size();
  asked.parts.push_back(std::move(bytes));
  if (!part.last) return false;
  asked.complete = true;
  const auto recovery = recoveries.find(group);
  if (recovery != recoveries.end()) {
    recovery->second.changed = true;
    recovery->second.asked.erase(asked.report.seat());
  }
  const wire::Rejoin rejoin = asked.report.rejoin();
  const std::vector<wire::LogEntry> entries = asked.log();
  if (const Status sound = check_log(rejoin, entries, options_); !sound) return refused(sound);
  if (recovery != recoveries.end()) return true;
  connection.asked.reset();
  connection.recovers = false;
  if (served_.find(group) != nullptr) {
    return_to(id, connection, rejoin, &entries, now);
  } else {
    connections_.close(id);  // the group has ended meanwhile; the member will try again
  }
  return false;
}

}  // namespace pccl::master
