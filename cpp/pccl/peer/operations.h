// Collective operations of one peer: starts their attempts in shared memory or over links, reports
// them to the master, and ends them by its verdicts. Pure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "pccl/collective/executor.h"
#include "pccl/peer/admission.h"
#include "pccl/peer/call_driver.h"
#include "pccl/peer/locality.h"

namespace pccl::peer {

// *one thread: the engine's*
class Operations {
 public:
  Operations(const collective::ExecutorOptions& options, CallDriver& calls, Session& session,
             Admission& admission, Locality& locality, std::shared_ptr<BufferPool> pool,
             link::Carrier& links, Parallel& parallel)
      : calls_(calls),
        session_(session),
        admission_(admission),
        locality_(locality),
        executor_(options, std::move(pool), links, parallel) {}

  // Arrays must stay valid until the call is done. Ends at once in a group of one, or with an
  // error.
  void start(const CallPtr& call, OperationRequest request, Instant now);
  // Reports operations as entered to the master: those whose delay has passed, or all.
  void report_entered(Instant now, bool all);
  // Error: the verdict contradicts this peer's reports, so that this peer must leave.
  Status on_verdict(const wire::Verdict& verdict);
  // Stops all attempts: no operation uses its arrays when this returns. Calls do not end.
  void stop_all();

  // -- a new epoch, in this order
  // For an epoch with fewer members or another plan: ends the operations that it aborts, and every
  // attempt.
  void end_attempts(const Record& record);
  void begin_epoch(const Record& record);
  // Starts an attempt of every open operation. Ends those that cannot run, for all members.
  void run_all(Instant now);

  // -- in memory
  void on_local_commit(const LocalCommit& commit);
  void on_local_escalation(const wire::OpKey& key, Instant now);
  // The operation runs in memory, and this attempt was not reported to the master.
  [[nodiscard]] bool in_memory_alone(const wire::CallKey& key) const;

  // -- over links. Call handle_executor() after every use of the executor that may produce events.
  [[nodiscard]] collective::Executor& executor() { return executor_; }
  [[nodiscard]] const collective::Executor& executor() const { return executor_; }
  void handle_executor(Instant now);
  [[nodiscard]] bool running() const { return executor_.operation_count() > 0; }
  // The operation was called here: frames for it are useless unless an attempt over links runs.
  [[nodiscard]] bool was_called(const wire::OpKey& key) const;

 private:
  [[nodiscard]] CallTable& table() { return calls_.table(); }
  [[nodiscard]] const Record& record() const { return session_.record(); }
  [[nodiscard]] std::optional<Error> misfit_of(const CallEntry& operation) const;
  void run(const wire::OpKey& key, Instant now);
  void run_on_network(const wire::OpKey& key, Instant now);
  void stop(const wire::OpKey& key);
  void fail_for_all(const wire::OpKey& key, const Error& error);
  void end(const wire::OpKey& key, Error error, const Record& record);

  CallDriver& calls_;
  Session& session_;
  Admission& admission_;
  Locality& locality_;
  collective::Executor executor_;
  std::uint64_t plan_hash_ = 0;  // of this epoch
};

}  // namespace pccl::peer
