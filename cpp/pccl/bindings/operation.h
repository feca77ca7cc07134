// An operation in flight as Python holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {

// REQUIRES, for all: the GIL.

// How an operation went, as pccl.types.ReduceInfo wants it.
struct Info {
  explicit Info(const peer::Call& call)
      : record(call.record),
        attempts(call.attempts),
        tx_bytes(call.traffic.tx_bytes),
        rx_bytes(call.traffic.rx_bytes) {}
  peer::Record record;
  std::uint32_t attempts;
  std::uint64_t tx_bytes;
  std::uint64_t rx_bytes;
};

struct Operation {
  Operation(std::shared_ptr<Comm> owner, peer::CallPtr handle, Arrays in_use, const char* name)
      : comm(std::move(owner)),
        call(std::move(handle)),
        arrays(std::move(in_use)),
        function(name) {}
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  [[nodiscard]] bool done() const {
    return call == nullptr || call->done.load(std::memory_order_acquire);
  }

  std::shared_ptr<Comm> comm;
  peer::CallPtr call;  // null: not started
  Arrays arrays;
  const char* function;
};

// (code, zero_exact, stochastic, block) of a reduce::Quantization.
using Quantized = std::tuple<unsigned, bool, bool, std::uint32_t>;

[[nodiscard]] std::shared_ptr<Operation> start_operation(
    const std::shared_ptr<Comm>& comm, const nb::iterable& arrays, int op,
    std::optional<std::uint64_t> tag, int level, bool rerun, const nb::bytes& structure,
    const std::string& description, Seconds timeout, int kind, std::uint32_t root,
    std::uint32_t parts, const std::optional<Quantized>& quantize, const nb::iterable& residuals,
    bool any_thread, bool wait, const nb::object& kept);

// Starts it. A newcomer is let in first.
[[nodiscard]] std::shared_ptr<Operation> launch(const std::shared_ptr<Comm>& comm,
                                                peer::OperationRequest request, Arrays in_use,
                                                const char* function, const Seconds& timeout);

// Starts it and waits until it is over. Nothing comes between the two: an interruption after the
// start ends the operation for all members. REQUIRES: `operation` has no call yet.
[[nodiscard]] Info carry_out(Operation& operation, peer::OperationRequest request,
                             const Seconds& timeout);

// The public name of the call.
[[nodiscard]] const char* function_of(int level,
                                      collective::Kind kind = collective::Kind::all_reduce);

// Their ids, in rank order.
[[nodiscard]] nb::tuple contributors(const peer::Record& record);

}  // namespace pccl::bindings
