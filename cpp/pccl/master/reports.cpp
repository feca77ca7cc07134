#include "pccl/master/reports.h"

#include <algorithm>
#include <set>

#include "pccl/base/name.h"
#include "pccl/digest/ticket.h"
#include "pccl/topology/plan.h"

namespace pccl::master {

std::string name_of(const wire::Rejoin& rejoin) {
  return wire::shown_name(rejoin.record.members, rejoin.id);
}

Status wrong_report(const std::string& who, const std::string& detail) {
  return Status(Code::evicted, "the report of peer " + who + " is inconsistent" + detail);
}

bool plausible(const wire::EpochRecord& record, const Options& options) {
  std::set<PeerId> ids;
  for (const wire::Member& member : record.members) {
    if (member.id.empty() || !ids.insert(member.id).second || member.joined > kMaxCount ||
        !(member.name.empty() || valid_name(member.name)))
      return false;
  }
  return !ids.empty() && ids.size() <= options.limits.max_peers && record.epoch <= kMaxCount &&
         record.points <= kMaxCount && topology::valid(record.plan, ids.size());
}

Status check(const wire::Rejoin& rejoin, const Options& options) {
  const auto& members = rejoin.record.members;
  const Seal seal = digest::seal_of(rejoin.ticket);
  const bool member = std::ranges::any_of(
      members, [&](const auto& known) { return known.id == rejoin.id && known.seal == seal; });
  if (!member || !plausible(rejoin.record, options) || rejoin.applied > kMaxCount)
    return wrong_report(rejoin.id.brief());
  if (const Status relays = wire::check_relays(rejoin.record); !relays)
    return wrong_report(name_of(rejoin), ": " + relays.error().reason);
  return {};
}

Status check_log(const wire::Rejoin& rejoin, const std::vector<wire::LogEntry>& log,
                 const Options& options) {
  if (log.size() > rejoin.applied) return wrong_report(name_of(rejoin));
  std::uint64_t ordinal = rejoin.applied - log.size();
  for (const wire::LogEntry& entry : log) {
    const auto* record = std::get_if<wire::EpochRecord>(&entry.what);
    if (entry.ordinal != ++ordinal || (record != nullptr && !plausible(*record, options)))
      return wrong_report(name_of(rejoin));
    if (record == nullptr) continue;
    if (const Status relays = wire::check_relays(*record); !relays)
      return wrong_report(name_of(rejoin), ": " + relays.error().reason);
  }
  return {};
}

}  // namespace pccl::master
