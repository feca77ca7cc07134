// Collective operations of one peer: starts their attempts in shared memory or over links, reports
// them to the master, and ends them by its verdicts. Pure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

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
             link::Carrier& links)
      : calls_(calls),
        session_(session),
        admission_(admission),
        locality_(locality),
        executor_(options, std::move(pool), links) {}

  // Arrays must stay valid until the call is done. Ends at once in a group of one, or with an
  // error.
  void start(const CallPtr& call, OperationRequest request, Instant now);
  // Tells the master which operations were entered: those whose delay has passed, or all.
  void report_entered(Instant now, bool all);
  // Error: the master contradicts what this peer has told it, so that this peer has to leave.
  Status on_verdict(const wire::Verdict& verdict);
  // No operation uses its arrays any more when this returns. They are not ended.
  void stop_all();

  // -- a new epoch, in this order
  // It has fewer members or another plan: ends the operations that it aborts, and every attempt.
  void end_attempts(const Record& record);
  void begin_epoch(const Record& record);
  // Starts an attempt of every operation that runs on. Ends for all members those that cannot.
  void run_all(Instant now);

  // -- in memory
  void on_local_commit(const LocalCommit& commit);
  // The operation goes on over the network, in this epoch, for all members.
  void on_local_escalation(const wire::OpKey& key, Instant now);
  // It runs in memory, and the master was not told of this attempt.
  [[nodiscard]] bool in_memory_alone(const wire::CallKey& key) const;

  // -- over links. Use told() after everything that may give the executor events.
  [[nodiscard]] collective::Executor& executor() { return executor_; }
  void told(Instant now);
  [[nodiscard]] bool running() const { return executor_.operation_count() > 0; }
  // What arrives for the operation after its end is of no use.
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
