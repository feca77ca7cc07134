// Opens, moves and ends calls: keeps the call table, the master and the waiting user in step. Pure.
#pragma once

#include <cstdint>
#include <optional>

#include "pccl/peer/actions.h"
#include "pccl/peer/calls.h"
#include "pccl/peer/session.h"
#include "pccl/peer/totals.h"

namespace pccl::peer {

// *one thread: the engine's*
class CallDriver {
 public:
  // `now`: the time of the event that is being handled.
  CallDriver(Session& session, EngineActions& actions, Tracer& tracer, const Instant& now)
      : session_(session), actions_(actions), tracer_(tracer), now_(now) {}

  [[nodiscard]] CallTable& table() { return table_; }
  [[nodiscard]] const CallTable& table() const { return table_; }
  [[nodiscard]] const Record& record() const { return session_.record(); }
  [[nodiscard]] Instant now() const { return now_; }

  // -- rounds
  // Enters the next round of that kind. Ends the call at once if that round is over already.
  void enter_next(const CallPtr& call, wire::RoundKind kind, wire::RoundPayload payload);
  void enter(const CallPtr& call, const wire::RoundKey& key, wire::RoundPayload payload);
  // Makes the call wait for round `next`. Returns the decision if that round is over already.
  [[nodiscard]] std::optional<Decision> move_to(const CallPtr& call, const wire::RoundKey& next);

  // Asks the master to end the call for all members. `lost`: the member whose loss is the reason.
  void request_abort(const wire::CallKey& key, Code code, const PeerId& lost = {});
  // Ends the call for its caller. Does nothing if the call has ended.
  void end(Call& call, Error error, const Record& record);
  // The same for a call that has no entry in the table.
  void refuse(Call& call, Code code, std::string reason, const Record& record = nullptr) {
    end(call, {code, std::move(reason)}, record);
  }
  // Memory that bytes come in to soon.
  void touch(std::vector<BufferPtr> memory) { actions_.touch = std::move(memory); }
  // Wakes the threads that wait for a call.
  void wake() { actions_.calls_ended = true; }

  // The admission in which this peer's first committed operation ran. 0: there was none.
  [[nodiscard]] std::uint64_t worked_since() const { return worked_since_; }
  [[nodiscard]] const Totals& totals() const { return totals_; }

 private:
  void count(const Call& call, bool committed);

  Session& session_;
  EngineActions& actions_;
  Tracer& tracer_;
  const Instant& now_;
  CallTable table_;
  std::uint64_t worked_since_ = 0;
  Totals totals_;
};

}  // namespace pccl::peer
