// The events of a peer's trace: the parts of its operations, the bytes on its links, epochs and
// losses. Off, it costs a comparison for each frame and each call. Pure: the shell writes the
// events (node/trace_writer.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "pccl/base/error.h"
#include "pccl/base/ids.h"
#include "pccl/peer/totals.h"
#include "pccl/wire/records.h"

namespace pccl::peer {

struct Call;

// An operation that has ended. Its parts are those of the last attempt.
struct TracedCall {
  wire::OpKey key;
  Timing::Marks marks;
  Code code = Code::ok;
  std::uint64_t bytes = 0;
  std::uint32_t attempts = 0;
  bool in_memory = false;
};
// Payloads of one operation to or from one peer, from the first frame to the last.
struct TracedFlow {
  wire::OpKey key;
  PeerId peer;
  bool sent = false;
  Instant first{};
  Instant last{};
  std::uint64_t bytes = 0;
};
// An epoch of a run begins. It names the peers of the flows that follow.
struct TracedEpoch {
  Instant at{};
  std::uint64_t run = 0;
  std::shared_ptr<const wire::EpochRecord> record;
};
using TraceEvent = std::variant<TracedCall, TracedFlow, TracedEpoch>;

// *one thread: the engine's*
class Tracer {
 public:
  explicit Tracer(bool on) : on_(on) {}

  [[nodiscard]] bool on() const { return on_; }
  // REQUIRES, for all: on().
  void moved(const wire::OpKey& key, const PeerId& peer, bool sent, std::uint64_t bytes,
             Instant now);
  void ended(const Call& call, Code code);
  void epoch(const std::shared_ptr<const wire::EpochRecord>& record, std::uint64_t run,
             Instant now);
  [[nodiscard]] bool has_events() const { return !events_.empty(); }
  [[nodiscard]] std::vector<TraceEvent> take() { return std::exchange(events_, {}); }

 private:
  // Flows of operations that have not ended here. Frames for calls that are never made stay here.
  static constexpr std::size_t kMaxFlows = 1 << 14;
  using FlowKey = std::tuple<wire::OpKey, PeerId, bool>;

  bool on_;
  std::map<FlowKey, TracedFlow> flows_;
  std::vector<TraceEvent> events_;
};

}  // namespace pccl::peer
