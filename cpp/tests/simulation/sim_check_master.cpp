// Checks of the master: I7 (it can be rebuilt), and replicas.
#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "tests/nobody.h"
#include "tests/simulation/sim_world.h"

namespace pccl::simulation {

using std::chrono::seconds;

// -- I7: the master can be rebuilt

// When nothing is in flight between the members and the master, a master rebuilt from their reports
// equals the present one.
void Checks::rebuild_now() {
  const std::uint32_t of =
      static_cast<std::uint32_t>(world_.random.below(std::max(1U, world_.options.ranks)));
  const master::Group* group = world_.master.group(of);
  if (failed() || group == nullptr || group->record().members.empty() || !world_.master.quiet()) {
    return;
  }
  // Members do not know undecided entries.
  const master::Quorum* const quorum = world_.master.quorum(of);
  if (world_.options.masters > 1 && (quorum == nullptr || quorum->proposal() != nullptr)) return;
  std::vector<master::Returned> reports;
  std::vector<const peer::Engine*> returned;  // by connection, from 1
  for (const wire::Member& member : group->record().members) {
    Host* host = world_.host_of(member.id);
    if (host == nullptr || !host->alive() || host->frozen() || !host->control_quiet()) return;
    const peer::Session& session = host->engine().session();
    if (!session.member() || !session.welcomed()) return;
    if (quorum != nullptr && session.term() != quorum->term()) return;
    reports.emplace_back(reports.size() + 1, session.rejoin());
    returned.push_back(&host->engine());
  }
  // The master must not wait for a call that the member has finished.
  for (const auto& [key, id] : group->calls().entries()) {
    if (world_.host_of(id)->engine().calls().awaits(key)) continue;
    return fail("I4", wire::describe(key) + " is open at the master for " +
                          world_.host_of(id)->name() + ", where it is over");
  }
  for (const auto& [key, operation] : group->calls().operations()) {
    std::size_t done = 0;
    std::set<std::uint64_t> signatures;
    for (const auto& [id, entry] : operation.entries()) {
      done += entry.done ? 1 : 0;
      if (entry.current) signatures.insert(entry.signature.hash);
    }
    if (done != operation.done() || (signatures.size() < 2) != operation.agree())
      return fail("I7", "the reports of " + wire::describe(key) + " are counted wrongly");
  }
  // Reports may arrive in any order.
  for (std::size_t i = reports.size(); i > 1; --i) {
    std::swap(reports[i - 1], reports[world_.random.below(i)]);
  }
  tests::Nobody nobody;
  const auto session_on = [&](master::ConnectionId connection) -> const peer::Session& {
    return returned[connection - 1]->session();
  };
  std::vector<wire::LogEntry> log;
  for (const wire::LogPart& part : session_on(master::newest(reports).connection()).log_parts())
    log.insert(log.end(), part.entries.begin(), part.entries.end());
  const std::unique_ptr<master::Group> again =
      master::Group::rebuild(of, world_.master_options, nobody, reports, log, world_.now());
  for (const master::Returned& one : reports) {
    const peer::Session& session = session_on(one.connection());
    // Requests to end a call have been decided already.
    std::vector<wire::Message> calls = returned[one.connection() - 1]->calls().open_messages();
    std::erase_if(calls, [](const wire::Message& message) {
      return std::holds_alternative<wire::AbortRequest>(message);
    });
    if (!calls.empty() && world_.bug_due(Bug::forget_entry)) continue;
    const wire::Envelope envelope{session.run(), session.term(), session.applied()};
    for (const wire::Message& message : calls)
      again->on_message(one.connection(), {envelope, message}, world_.now());
  }
  ++world_.report.rebuilds;
  wire::EpochRecord record = group->record();
  record.aborted.clear();  // the log has these
  record.departures.clear();
  if (again->record() != record) {
    fail("I7", "a rebuilt master has another record");
  } else if (again->log().last() != group->log().last()) {
    fail("I7", "a rebuilt master has ordinal " + std::to_string(again->log().last()) + ", not " +
                   std::to_string(group->log().last()));
  } else if (again->summary() != group->summary()) {
    fail("I7",
         "a rebuilt master stands at\n" + again->summary() + "\ninstead of\n" + group->summary());
  }
}

// -- replicas

// Records the replicas of a group after an admission point.
void Checks::same_replicas(const peer::Record& record) {
  if (world_.options.ranks == 0 || record == nullptr) return;
  std::set<std::size_t> lives;
  // A master that rebuilds no group counts points from 0: distinguish by run and term.
  std::uint64_t run = 0;
  for (const wire::Member& member : record->members) {
    const Host* host = world_.host_of(member.id);
    lives.insert(host->rank_id().life);
    if (run == 0 && host->engine().standing() == peer::Standing::member)
      run = host->engine().session().run() + host->engine().session().term();
  }
  if (run != 0) points_[{run, record->points}].insert(std::move(lives));
}

void Checks::note_losses(const peer::Record& record) {
  if (world_.options.ranks == 0 || record == nullptr) return;
  for (const wire::Departure& gone : record->departures) {
    const Host* host = world_.host_of(gone.id);
    if (host != nullptr && gone.reason != "it left") lost_.insert(host->rank_id().life);
  }
}

// All groups had the same replicas after each admission point, except for lost ones.
void Checks::replicas_were_the_same() {
  for (const auto& [point, seen] : points_) {
    std::set<std::size_t> any;
    for (const auto& lives : seen) any.insert(lives.begin(), lives.end());
    for (const std::size_t life : any) {
      const bool everywhere = std::all_of(seen.begin(), seen.end(),
                                          [&](const auto& lives) { return lives.contains(life); });
      const auto& hosts = world_.lives[life].hosts;
      if (everywhere || lost_.contains(life) || hosts.size() < world_.options.ranks) continue;
      if (std::all_of(hosts.begin(), hosts.end(),
                      [](const Host* host) { return host->alive() && host->ended_well(); })) {
        return fail("replicas", world_.lives[life].name + " was a member after admission point " +
                                    std::to_string(point.second) +
                                    " in some groups and not in others, and was not lost");
      }
    }
  }
}

// Some time after a rank was lost, no rank of its replica is a member.
void Checks::replicas_are_whole() {
  if (world_.options.ranks == 0 || failed()) return;
  for (const World::Life& life : world_.lives) {
    for (const Host* lost : life.hosts) {
      if (!lost->program_over() || lost->ended_well()) continue;
      if (world_.now() - std::max(lost->ended_at(), world_.calm_since()) < seconds(40)) continue;
      for (const Host* other : life.hosts) {
        const master::Group* group = world_.master.group(other->group());
        if (group == nullptr || other == lost) continue;
        for (const wire::Member& member : group->record().members) {
          if (member.id == other->engine().session().id())
            return fail("replicas", other->name() + " is still a member, and " + lost->name() +
                                        " of its replica was lost");
        }
      }
    }
  }
}

}  // namespace pccl::simulation
