// Commands of the operator.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "pccl/base/text.h"
#include "pccl/base/utf8.h"
#include "pccl/master/operators.h"

namespace pccl::master {

void Operators::on_command(ConnectionId id, ControlPeer& connection, const wire::Command& command,
                           Instant now) {
  if (++connection.inquiries > kMaxInquiries || !commands_.take(kCommands, now))
    return connections_.refuse(id, Code::refused, "too many commands; try again later");
  connection.since = now;
  served_.send(id, 0, carry_out(command, now));
}

wire::CommandResult Operators::carry_out(const wire::Command& command, Instant now) {
  // Another master may serve the run, or take it over: this one would change nothing there.
  const bool idle =
      std::ranges::all_of(served_.all(), [](const auto& item) { return item.second->empty(); });
  if (!options_.place.alone() && idle) return {false, "this master serves no peers now"};
  if (command.kind == wire::CommandKind::pause_admission) return pause_admission(true, now);
  if (command.kind == wire::CommandKind::resume_admission) return pause_admission(false, now);
  struct Found {
    std::uint32_t group = 0;
    PeerId id;
    std::string named;
  };
  std::vector<Found> found;
  bool elsewhere = false;  // than in a pair, where a member has its name, too
  for (const auto& [number, group] : served_.all()) {
    if (number >= kFirstPair && elsewhere) break;
    for (auto& [id, named] : group->find(command.name))
      found.push_back({number, id, std::move(named)});
    elsewhere = elsewhere || (number < kFirstPair && !found.empty());
  }
  const std::string name = shortened(command.name, kShownText);
  if (found.empty()) return {false, "no peer of this run has the name or id \"" + name + "\""};
  if (found.size() > 1) {
    std::string names;
    for (std::size_t i = 0; i < found.size() && i < kShownNames; ++i) {
      names += (i > 0 ? ", " : " ") + found[i].named + " of group " +
               std::to_string(found[i].group) + " with id " + found[i].id.brief();
    }
    return {false, plural(found.size(), "peer") + " have the name \"" + name +
                       "\"; give an id instead:" + names +
                       (found.size() > kShownNames ? " ..." : "")};
  }
  const Found& one = found.front();
  Group& group = *served_.find(one.group);
  const std::string what = one.named + " of group " + std::to_string(one.group);
  if (command.kind == wire::CommandKind::kick) {
    outbox_.log({true, one.group, group.record().epoch, "the operator kicks " + one.named});
    group.kick(one.id, now);
    return {true, "kicked " + what};
  }
  if (!group.drain(one.id))
    return {false, what + " is not connected to the master now; try again in a moment"};
  outbox_.log({false, one.group, group.record().epoch,
               "the operator asks " + one.named + " to leave at its next admission point"});
  return {true, "asked " + what + " to leave at its next admission point"};
}

wire::CommandResult Operators::pause_admission(bool pause, Instant now) {
  if (run_.admission_paused == pause)
    return {true, pause ? "admission is paused already" : "admission was not paused"};
  run_.admission_paused = pause;
  outbox_.log(
      {true, {}, 0, std::string("the operator ") + (pause ? "pauses" : "resumes") + " admission"});
  for (const auto& [number, group] : served_.all()) group->admission_changed(now);
  return {true, pause ? "newcomers of groups that have started wait until admission is resumed"
                      : "newcomers are admitted again"};
}

}  // namespace pccl::master
