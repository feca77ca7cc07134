// Where the time of operations goes, and sums over the calls of this peer that have ended.
#pragma once

#include <cstdint>

#include "pccl/base/ids.h"

namespace pccl::peer {

// Parts of the time of an operation, one after the other. They add up to the whole.
struct Spent {
  // Until every member from which this one receives has begun to send, or, in shared memory, has
  // come to the operation. An attempt in shared memory that was lost is in here, too.
  Duration waiting{};
  Duration moving{};    // until all of this member's results are here: sending, receiving, reducing
  Duration deciding{};  // until the decision: the slower members, and the way to the master
  [[nodiscard]] Duration total() const { return waiting + moving + deciding; }
  void operator+=(const Spent& other) {
    waiting += other.waiting;
    moving += other.moving;
    deciding += other.deciding;
  }
};

// Measures the parts of one operation.
class Timing {
 public:
  // The times at which the operation began, its last attempt began, all had met, this peer had
  // finished, and the operation ended. Zero: not reached.
  struct Marks {
    Instant begun{};
    Instant attempt{};
    Instant met{};
    Instant finished{};
    Instant ended{};
  };
  void begin(Instant now) { since_ = marks_.begun = marks_.attempt = now; }
  // An attempt begins (again), has met the others, or has finished.
  void attempt(Instant now) {
    turn(&Spent::waiting, now);
    marks_.attempt = now;
    marks_.met = marks_.finished = {};
  }
  void met(Instant now) {
    turn(&Spent::moving, now);
    marks_.met = now;
  }
  void finished(Instant now) {
    turn(&Spent::deciding, now);
    marks_.finished = now;
  }
  void end(Instant now) {
    turn(part_, now);
    marks_.ended = now;
  }
  [[nodiscard]] const Spent& spent() const { return spent_; }
  [[nodiscard]] const Marks& marks() const { return marks_; }

 private:
  void turn(Duration Spent::*to, Instant now) {
    // Rounds are not measured. An event may be older than the one before it in the same step.
    if (since_ != Instant{} && now > since_) {
      spent_.*part_ += now - since_;
      since_ = now;
    }
    part_ = to;
  }

  Spent spent_;
  Duration Spent::*part_ = &Spent::waiting;
  Instant since_{};
  Marks marks_;
};

// Since this communicator joined. Operations are collectives on arrays; rounds, such as a barrier,
// are not counted.
struct Totals {
  std::uint64_t operations = 0;  // committed
  std::uint64_t aborted = 0;     // operations that ended otherwise
  // Bytes of the arrays of committed operations: of the elements that this member passes, and in a
  // broadcast of those that it receives.
  std::uint64_t reduced_bytes = 0;
  // Payload of operations and syncs that have ended, also of attempts that were lost, to and from
  // other members: over links, and through shared memory.
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
  std::uint64_t saved_bytes = 0;  // sent_bytes would be more by this without quantization
  std::uint64_t reruns = 0;       // attempts after the first one
  Spent spent;                    // on operations
};

}  // namespace pccl::peer
