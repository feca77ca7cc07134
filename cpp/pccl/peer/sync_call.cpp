#include "pccl/peer/sync_call.h"

#include <set>
#include <string>
#include <utility>

namespace pccl::peer {
namespace {

constexpr std::uint32_t kMaxTries = 8;

// Entries have new bytes also if an earlier try has written them.
void add_overwritten(const state::LocalState& state, state::Update& update) {
  std::set<std::string> written(update.written.begin(), update.written.end());
  std::set<std::string> overwritten;
  for (const state::LocalEntry& entry : state.entries) {
    const wire::StateEntry& what = entry.what;
    if (!entry.overwritten && !overwritten.contains(what.tie)) continue;
    overwritten.insert(what.name);
    if (written.insert(what.name).second) update.written.push_back(what.name);
  }
}

}  // namespace

void SyncCall::start(const CallPtr& call, SyncRequest request) {
  admission_.pay_sync();
  request.vote.structure = state::structure_of(request.state->manifest.entries);
  request.vote.member_since = admission_.admitted()->epoch;
  request.vote.worked_since = calls_.worked_since();
  sync_ = Sync{};
  sync_->call = call;
  sync_->request = std::move(request);
  vote();
}

bool SyncCall::owns(const wire::RoundKey& key) const {
  const bool of_sync = key.kind == wire::RoundKind::sync ||
                       key.kind == wire::RoundKind::sync_detail ||
                       key.kind == wire::RoundKind::sync_end;
  return sync_ && of_sync && key.admission == sync_->id.admission &&
         key.sequence == sync_->id.sequence;
}

// Enters the first round. Repeated when all holders of the elected state are gone.
void SyncCall::vote() {
  CallTable& table = calls_.table();
  const std::uint64_t sequence = table.next_round(wire::RoundKind::sync).sequence;
  table.skip_rounds(wire::RoundKind::sync_detail, sequence + 1);
  table.skip_rounds(wire::RoundKind::sync_end, sequence + 1);
  sync_->id = {calls_.record()->admission, sequence};
  ++sync_->tries;
  sync_->question.reset();
  sync_->unanswered = sync_->complete = false;
  const state::LocalState& state = *sync_->request.state;
  wire::SyncVote& vote = sync_->request.vote;
  vote.content = state::content_of(state.manifest.entries, false);
  vote.loose = state::content_of(state.manifest.entries, true);
  vote.mixed = vote.mixed || state.mixed;  // the last try has overwritten a part
  enter(wire::RoundKind::sync, vote);
}

void SyncCall::enter(wire::RoundKind kind, wire::RoundPayload payload) {
  if (!move_to(kind)) return;
  calls_.enter(sync_->call, {kind, sync_->id.admission, sync_->id.sequence}, std::move(payload));
}

// Makes the sync wait for that round. False: the round is over already, and the sync with it.
bool SyncCall::move_to(wire::RoundKind kind) {
  const auto early = calls_.move_to(sync_->call, {kind, sync_->id.admission, sync_->id.sequence});
  if (early) end(early->error, early->record);
  return !early;
}

void SyncCall::on_outcome(const wire::Outcome& outcome, const Error& error) {
  if (error.code != Code::ok) {
    (void)end_transfer();
    return end(error, calls_.record());
  }
  Sync& sync = *sync_;
  switch (outcome.sync.step) {
    case wire::SyncStep::none:
      return end({Code::internal_error, "the master closed a sync without a decision"},
                 calls_.record());
    case wire::SyncStep::detail:
      return enter(wire::RoundKind::sync_detail,
                   wire::SyncDetail{sync.request.vote, sync.request.state->manifest.entries});
    case wire::SyncStep::transfer: {
      if (!move_to(wire::RoundKind::sync_end)) return;
      transfer_.begin(sync.id, self_, sync.request.state, outcome.sync,
                      {sync.request.questions, sync.request.parallel});
      links_changed_ = true;
      handle_transfer();
      // A member that only serves is done. The round waits for the receivers.
      if (sync_ && !transfer_.receiving()) on_over(Code::ok, {});
      return;
    }
    case wire::SyncStep::again: {
      const std::unique_ptr<state::Update> update = end_transfer();
      if (update) {
        sync.tx_bytes += update->tx_bytes;
        sync.rx_bytes += update->rx_bytes;
      }
      return vote();
    }
    case wire::SyncStep::done: {
      std::unique_ptr<state::Update> update = end_transfer();
      if (!update) {
        update = std::make_unique<state::Update>();
        update->decision = outcome.sync;
      }
      update->decision.revision = outcome.sync.revision;
      update->tx_bytes += sync.tx_bytes;
      update->rx_bytes += sync.rx_bytes;
      add_overwritten(*sync.request.state, *update);
      sync.call->update = std::move(update);
      return end({Code::ok, {}}, calls_.record());
    }
  }
}

void SyncCall::handle_transfer() {
  const state::TransferEvents events = transfer_.take_events();
  if (sync_ && transfer_.active()) {
    sync_->call->bytes_wanted = transfer_.bytes_wanted();
    sync_->call->bytes_done = transfer_.bytes_done();
  }
  if (events.planned) on_planned();
  if (events.over) on_over(events.over->code, events.over->reason);
}

void SyncCall::on_planned() {
  if (!sync_) return;
  calls_.touch(transfer_.memory());
  if (!sync_->request.questions) return;
  std::vector<wire::StateEntry> entries = transfer_.replacements();
  if (entries.empty()) return;
  sync_->question = std::move(entries);
  sync_->unanswered = true;
  sync_->call->asks.store(true, std::memory_order_release);
  calls_.wake();
}

std::vector<wire::StateEntry> SyncCall::take_question(const CallPtr& call) {
  call->asks.store(false, std::memory_order_release);
  if (!sync_ || sync_->call != call || !sync_->question) return {};
  std::vector<wire::StateEntry> entries = std::move(*sync_->question);
  sync_->question.reset();
  return entries;
}

void SyncCall::answer(const CallPtr& call, const Error& error) {
  // If there is a new question already, this does not answer it.
  if (!sync_ || sync_->call != call || !sync_->unanswered || sync_->question) return;
  sync_->unanswered = false;
  if (error.code != Code::ok) {
    transfer_.stop();
    return on_over(error.code, error.reason);
  }
  transfer_.go_on();
  handle_transfer();
  if (sync_ && std::exchange(sync_->complete, false)) on_over(Code::ok, {});
}

// The transfer is over here: reports that in the last round. Success waits for the caller's answer.
void SyncCall::on_over(Code code, const std::string& reason) {
  if (!sync_) return;
  if (code == Code::ok && sync_->unanswered) {
    sync_->complete = true;
    return;
  }
  sync_->unanswered = false;
  wire::SyncEnd end{code, reason, 0, {}, {}};
  const wire::SyncDecision& decision = transfer_.decision();
  if (code == Code::peer_lost) end.lost = state::sources_of(decision, self_);
  end.revision = decision.revision;
  end.content = decision.content;
  if (code == Code::peer_lost && sync_->tries >= kMaxTries) end.code = Code::state_unavailable;
  enter(wire::RoundKind::sync_end, std::move(end));
}

// Ends the transfer, and the need for its links. Null: there was none.
std::unique_ptr<state::Update> SyncCall::end_transfer() {
  std::unique_ptr<state::Update> update = transfer_.end();
  if (update) links_changed_ = true;
  return update;
}

void SyncCall::end(Error error, const Record& record) {
  const CallPtr call = sync_->call;
  sync_.reset();
  (void)transfer_.end();
  calls_.table().end(call->key);
  calls_.end(*call, std::move(error), record);
}

}  // namespace pccl::peer
