// One member's part in a sync of the shared state: a vote, and if members differ details, a
// transfer and a last round. If all elected holders are lost, the members vote again. Pure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pccl/peer/admission.h"
#include "pccl/peer/call_driver.h"
#include "pccl/state/transfer.h"

namespace pccl::peer {

// A member's state and its vote.
struct SyncRequest {
  std::shared_ptr<state::LocalState> state;
  wire::SyncVote vote;     // the call fills in its digests and ages
  bool questions = false;  // the caller answers take_question(), and the sync waits for the answer
  Parallel* parallel = nullptr;  // see TransferOptions
};

// One sync at a time. *one thread: the engine's*
class SyncCall {
 public:
  SyncCall(CallDriver& calls, Admission& admission, const PeerId& self,
           std::shared_ptr<BufferPool> pool, link::Carrier& links,
           state::NeighbourMemory& neighbours)
      : calls_(calls),
        admission_(admission),
        self_(self),
        transfer_(std::move(pool), links, neighbours) {}

  // REQUIRES: not active().
  void start(const CallPtr& call, SyncRequest request);
  [[nodiscard]] bool active() const { return sync_.has_value(); }
  // The round belongs to this sync, and not to an earlier one.
  [[nodiscard]] bool owns(const wire::RoundKey& key) const;
  void on_outcome(const wire::Outcome& outcome, const Error& error);
  // Ends the call, also before its last round. REQUIRES: active().
  void end(Error error, const Record& record);
  // The call does not wait for a call of another member.
  [[nodiscard]] bool proceeds(const CallPtr& call) const {
    return sync_ && call == sync_->call && (transfer_.receiving() || sync_->unanswered);
  }

  // -- the question to a receiver's caller: can it use these entries?
  // Entries that this peer has to create or replace. Empty: there is no question.
  [[nodiscard]] std::vector<wire::StateEntry> take_question(const CallPtr& call);
  // An error ends this receiver's part in the sync, and the master removes it with that reason.
  void answer(const CallPtr& call, const Error& error);

  // -- the transfer. Call handle_transfer() after every use of it that may produce events.
  [[nodiscard]] state::Transfer& transfer() { return transfer_; }
  [[nodiscard]] const state::Transfer& transfer() const { return transfer_; }
  void handle_transfer();
  // True once after each change of the links that are needed.
  [[nodiscard]] bool take_links_changed() { return std::exchange(links_changed_, false); }

 private:
  struct Sync {
    CallPtr call;
    SyncRequest request;
    state::SyncId id;
    std::uint32_t tries = 0;
    std::optional<std::vector<wire::StateEntry>> question;  // not taken yet
    bool unanswered = false;
    bool complete = false;       // only the answer is missing
    std::uint64_t tx_bytes = 0;  // of earlier tries
    std::uint64_t rx_bytes = 0;
  };
  void vote();
  void enter(wire::RoundKind kind, wire::RoundPayload payload);
  [[nodiscard]] bool move_to(wire::RoundKind kind);
  void on_planned();
  void on_over(Code code, const std::string& reason);
  std::unique_ptr<state::Update> end_transfer();

  CallDriver& calls_;
  Admission& admission_;
  PeerId self_;
  state::Transfer transfer_;
  std::optional<Sync> sync_;
  bool links_changed_ = false;
};

}  // namespace pccl::peer
