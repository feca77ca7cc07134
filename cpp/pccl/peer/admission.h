// The admission of this peer to its group, and a member's view of newcomers. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "pccl/link/links.h"
#include "pccl/peer/session.h"

namespace pccl::peer {

// *one thread: the engine's*
class Admission {
 public:
  Admission(Session& session, const JoinOptions& options)
      : session_(session), options_(options), waits_(options.waiting) {}

  // -- before this peer is a member
  void on_welcome(const wire::Welcome& welcome);
  // Asks the master for admission, since this peer's next call is collective. Does nothing when
  // repeated, or for a member.
  void request();
  // Withdraws the request, since its caller gave up. False: there is none, or it has succeeded.
  [[nodiscard]] bool withdraw();
  [[nodiscard]] bool waits() const { return waits_; }
  // How many peers are missing before the group can start, as of the last Welcome.
  [[nodiscard]] std::uint32_t waiting_for() const { return waiting_for_; }
  // This peer's join ordinal. The peer with the higher ordinal of a pair dials.
  [[nodiscard]] std::uint64_t joined() const { return joined_; }

  // The master prepares an epoch with this peer. False: this peer does not wait for admission.
  [[nodiscard]] bool on_prepare(const wire::Prepare& prepare);
  [[nodiscard]] const std::optional<wire::Prepare>& prepare() const { return prepare_; }
  // Reports to the master once the links to all members of the prepared epoch are up or failed.
  void check_prepared(const link::LinkTable& links);
  // A link went down: a newcomer must report again that it is prepared.
  void on_link_down() {
    if (prepare_) prepared_epoch_ = 0;
  }

  // -- a member
  // Begins an epoch that admits peers.
  void begin(const Record& record);
  // The epoch that admitted this peer. Null: it was never a member.
  [[nodiscard]] const Record& admitted() const { return admitted_; }
  // True from this peer's admission until its first collective call, which calls use_fresh().
  [[nodiscard]] bool fresh() const { return fresh_; }
  void use_fresh() { fresh_ = false; }
  // A running sync admitted this peer: its own sync begins after the admission round.
  [[nodiscard]] bool owes_sync() const { return owes_sync_; }
  void pay_sync() { owes_sync_ = false; }

  // Sets the peers that the next admission may admit.
  void expect(std::vector<wire::Member> newcomers) { newcomers_ = std::move(newcomers); }
  [[nodiscard]] const std::vector<wire::Member>& newcomers() const { return newcomers_; }
  // An operation was committed. `due`: the next admission point needs its round. Every commit tells
  // all members the same.
  void on_commit(bool due) { admission_due_ = admission_due_.value_or(false) || due; }
  // Whether an admission point of the simple API needs its round with the master, for newcomers or
  // a measurement: a commit since the last point has said so, or there was no commit. Replicas
  // always need it: their ranks must pass equally many points.
  [[nodiscard]] bool round_needed() const {
    const Record& record = session_.record();
    return admission_due_.value_or(true) || (record != nullptr && record->ranks_per_replica > 0);
  }
  void pass_point() { admission_due_.reset(); }

 private:
  void tell_round_trips(const link::LinkTable& links);

  Session& session_;
  const JoinOptions& options_;
  std::uint64_t joined_ = 0;
  std::uint32_t waiting_for_ = 0;
  bool waits_ = false;
  bool requested_ = false;  // waits because its first collective call requested admission
  std::optional<wire::Prepare> prepare_;
  std::uint64_t prepared_epoch_ = 0;  // the last one reported as prepared
  std::vector<PeerId> prepared_without_;
  wire::Measurements told_;  // the round trips last reported to the master

  Record admitted_;
  bool fresh_ = false;
  bool owes_sync_ = false;
  std::vector<wire::Member> newcomers_;
  // Whether a commit since the last admission point has said so. Empty: no commit yet.
  std::optional<bool> admission_due_;
};

}  // namespace pccl::peer
