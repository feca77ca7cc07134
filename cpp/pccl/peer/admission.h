// This peer's way into its group, and what a member knows of newcomers. Pure.
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
  // This peer's next call is a collective one: it waits to be let in. False: it waits already, or
  // is a member.
  void request();
  // The caller gave up waiting. False: there was nothing to withdraw.
  [[nodiscard]] bool withdraw();
  [[nodiscard]] bool waits() const { return waits_; }
  // Peers for which the master waits before the group starts, as of the last welcome.
  [[nodiscard]] std::uint32_t waiting_for() const { return waiting_for_; }
  // The order in which the master has seen peers join; the later one of a pair dials.
  [[nodiscard]] std::uint64_t joined() const { return joined_; }

  // The master prepares an epoch with this peer. False: this peer does not wait to be let in.
  [[nodiscard]] bool on_prepare(const wire::Prepare& prepare);
  [[nodiscard]] const std::optional<wire::Prepare>& prepare() const { return prepare_; }
  // Tells the master when the links to all members of the prepared epoch are up or have failed.
  void check_prepared(const link::LinkTable& links);
  // A link went down: readiness has to be reported again.
  void on_link_down() {
    if (prepare_) prepared_epoch_ = 0;
  }

  // -- a member
  // An epoch that admits peers.
  void begin(const Record& record);
  // The epoch that let this peer in. Null: it was never a member.
  [[nodiscard]] const Record& admitted() const { return admitted_; }
  // No collective call yet since this peer was let in; `use_fresh` is that call.
  [[nodiscard]] bool fresh() const { return fresh_; }
  void use_fresh() { fresh_ = false; }
  // This peer was let in by a sync that goes on: its own sync begins after the admission.
  [[nodiscard]] bool owes_sync() const { return owes_sync_; }
  void pay_sync() { owes_sync_ = false; }

  // Peers that the next admission may let in.
  void expect(std::vector<wire::Member> newcomers) { newcomers_ = std::move(newcomers); }
  [[nodiscard]] const std::vector<wire::Member>& newcomers() const { return newcomers_; }
  // A call was committed. All members learn with a commit whether newcomers wait.
  void on_commit(bool newcomers_wait) {
    newcomers_wait_ = newcomers_wait_.value_or(false) || newcomers_wait;
  }
  // Level 2's admission point asks the master only when newcomers wait, or links are to be
  // measured (a commit says the same of both), or when no commit has told. Replicas always ask: the
  // ranks of one replica have to pass equally many points.
  [[nodiscard]] bool round_needed() const {
    const Record& record = session_.record();
    return newcomers_wait_.value_or(true) || (record != nullptr && record->ranks_per_replica > 0);
  }
  void pass_point() { newcomers_wait_.reset(); }

 private:
  Session& session_;
  const JoinOptions& options_;
  std::uint64_t joined_ = 0;
  std::uint32_t waiting_for_ = 0;
  bool waits_ = false;
  bool requested_ = false;  // waits because its first collective call asked for it
  std::optional<wire::Prepare> prepare_;
  std::uint64_t prepared_epoch_ = 0;  // the last one reported as prepared
  std::vector<PeerId> prepared_without_;

  Record admitted_;
  bool fresh_ = false;
  bool owes_sync_ = false;
  std::vector<wire::Member> newcomers_;
  // Whether newcomers waited at a commit since the last admission point. Empty: no commit yet.
  std::optional<bool> newcomers_wait_;
};

}  // namespace pccl::peer
