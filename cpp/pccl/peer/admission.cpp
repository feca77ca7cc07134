#include "pccl/peer/admission.h"

#include <utility>

#include "pccl/measured/live_rates.h"
#include "pccl/topology/rates.h"

namespace pccl::peer {

void Admission::on_welcome(const wire::Welcome& welcome) {
  joined_ = welcome.joined;
  if (session_.member()) return;
  prepared_epoch_ = 0;
  told_ = {};
  waiting_for_ = welcome.waiting_for;
  // Every Join repeats whether this peer waits. If the answer reports that the group has started,
  // there is no start to wait for.
  const bool start_is_over = options_.start_only && welcome.group_started;
  waits_ = requested_ || (options_.waiting && !start_is_over);
}

void Admission::request() {
  if (session_.member() || requested_) return;
  requested_ = true;
  waits_ = true;
  session_.request_admission();
}

bool Admission::withdraw() {
  if (session_.member() || !requested_) return false;
  requested_ = false;
  waits_ = false;
  prepare_.reset();
  prepared_epoch_ = 0;
  session_.withdraw_admission();
  return true;
}

bool Admission::on_prepare(const wire::Prepare& prepare) {
  if (session_.member() || !waits_) return false;
  prepare_ = prepare;
  return true;
}

void Admission::check_prepared(const link::LinkTable& links) {
  if (session_.member() || !prepare_) return;
  std::vector<PeerId> without;
  for (const wire::Member& member : prepare_->members) {
    if (!links.contains(member.id)) return;
    if (links.is_up(member.id)) continue;
    if (!links.has_failed(member.id)) return;
    without.push_back(member.id);
  }
  // Repeat a report with missing links: the master ignores it until it has accepted these links as
  // unreachable.
  if (prepared_epoch_ == prepare_->epoch && without.empty() && prepared_without_.empty()) return;
  prepared_epoch_ = prepare_->epoch;
  prepared_without_ = without;
  tell_round_trips(links);
  session_.say(wire::Prepared{prepare_->epoch, without});
}

void Admission::tell_round_trips(const link::LinkTable& links) {
  if (prepare_->members.size() > topology::kMaxTable) return;
  wire::Measurements row = measured::first_round_trips(
      prepare_->members, [&](const PeerId& peer) { return links.round_trip(peer); });
  if (row == told_) return;
  told_ = row;
  session_.say(wire::Measured{std::move(row)});
}

void Admission::begin(const Record& record) {
  const bool new_here = admitted_ == nullptr;
  waits_ = false;
  waiting_for_ = 0;
  prepare_.reset();
  admission_due_.reset();
  if (new_here) {
    fresh_ = true;
    admitted_ = record;
  }
  owes_sync_ = new_here && record->syncing;
}

}  // namespace pccl::peer
