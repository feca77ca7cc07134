// Operations as Python holds them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {

// REQUIRES, for all: the GIL.

// The outcome of an operation, for pccl.types.ReduceInfo.
struct Info {
  explicit Info(const peer::Call& call)
      : record(call.record),
        attempts(call.attempts),
        tx_bytes(call.traffic.tx_bytes),
        rx_bytes(call.traffic.rx_bytes),
        bytes(call.bytes),
        spent(call.timing.spent()) {}
  peer::Record record;
  std::uint32_t attempts;
  std::uint64_t tx_bytes;
  std::uint64_t rx_bytes;
  std::uint64_t bytes;
  peer::Spent spent;
};

// A handle of an operation that has begun, or is about to.
struct OperationHandle {
  OperationHandle(std::shared_ptr<CommunicatorHandle> owner, peer::CallPtr handle, Arrays in_use,
                  const char* name)
      : comm(std::move(owner)),
        call(std::move(handle)),
        arrays(std::move(in_use)),
        function(name) {}
  ~OperationHandle();
  OperationHandle(const OperationHandle&) = delete;
  OperationHandle& operator=(const OperationHandle&) = delete;
  [[nodiscard]] bool done() const {
    return call == nullptr || call->done.load(std::memory_order_acquire);
  }
  // The number of members whose arrays are in the result; 0: it failed, or is not over.
  [[nodiscard]] std::size_t contributors() const {
    if (call == nullptr || !done() || call->error.code != Code::ok) return 0;
    return call->record == nullptr ? 0 : call->record->members.size();
  }

  std::shared_ptr<CommunicatorHandle> comm;
  peer::CallPtr call;  // null: not started
  Arrays arrays;
  const char* function;
};

// (code, zero_exact, stochastic, block) of a reduce::Quantization.
using Quantized = std::tuple<unsigned, bool, bool, std::uint32_t>;

// How elements are sent, and the words for it that members compare: pccl.quantize.Coding.
using Coding = std::optional<std::pair<Quantized, std::string>>;

[[nodiscard]] std::shared_ptr<OperationHandle> start_operation(
    const std::shared_ptr<CommunicatorHandle>& comm, const nb::iterable& arrays, int op,
    std::optional<std::uint64_t> tag, int level, bool rerun, const nb::bytes& structure,
    const std::string& description, Seconds timeout, int kind, std::uint32_t root,
    std::uint32_t parts, const std::optional<Quantized>& quantized, const nb::iterable& residuals,
    std::uint32_t residual_members, bool any_thread, bool wait, const nb::object& kept);

// Sets how the request's elements are sent. Raises InvalidArgument of `function` for unknown codes,
// products and other collectives than an all-reduce. REQUIRES: its kind and op are set.
void quantize(peer::OperationRequest& request, const Quantized& how, const char* function);

// Starts an operation. A newcomer waits first until it is let in.
[[nodiscard]] std::shared_ptr<OperationHandle> launch(
    const std::shared_ptr<CommunicatorHandle>& comm, peer::OperationRequest request, Arrays in_use,
    const char* function, const Seconds& timeout);

// Starts an operation and waits for its end, in one call of the engine: an interruption after the
// start ends the operation for all members. REQUIRES: `operation` has no call yet.
[[nodiscard]] Info carry_out(OperationHandle& operation, peer::OperationRequest request,
                             const Seconds& timeout);

// -- the fast path: one native call, since a small reduction takes no longer than the general
// path's preparation. The simple API, for plain arrays (plain.h) and a `ReduceOp` or its name. With
// anything else nothing is started, and nothing returned.

// A whole operation: its result, and its outcome.
[[nodiscard]] std::optional<std::pair<nb::object, Info>> reduce_tree(
    const std::shared_ptr<CommunicatorHandle>& comm, nb::handle tree, nb::handle out, nb::handle op,
    nb::handle tag, Seconds timeout, const Coding& coding);
// An operation that has begun, and its result, which is complete when it is done.
[[nodiscard]] std::optional<std::pair<std::shared_ptr<OperationHandle>, nb::object>> start_tree(
    const std::shared_ptr<CommunicatorHandle>& comm, nb::handle tree, nb::handle out, nb::handle op,
    nb::handle tag, Seconds timeout, const Coding& coding);

// A collective other than an all-reduce, of one array; no tree. Level 1: `out` is given, in any
// shape. `root`, `op`: where the kind has one.
[[nodiscard]] std::optional<std::pair<nb::object, Info>> collect(
    const std::shared_ptr<CommunicatorHandle>& comm, int kind, int level, nb::handle array,
    nb::handle out, int op, nb::handle root, nb::handle tag, Seconds timeout);

// The public name of the call.
[[nodiscard]] const char* function_of(int level,
                                      collective::Kind kind = collective::Kind::all_reduce);

}  // namespace pccl::bindings
