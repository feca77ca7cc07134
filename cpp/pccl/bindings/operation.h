// An operation in flight as Python holds it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "pccl/bindings/communicator.h"

namespace pccl::bindings {

// REQUIRES, for all: the GIL.
struct Operation {
  Operation(std::shared_ptr<Comm> owner, peer::CallPtr handle, Arrays in_use, const char* name)
      : comm(std::move(owner)),
        call(std::move(handle)),
        arrays(std::move(in_use)),
        function(name) {}
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  [[nodiscard]] bool done() const { return call->done.load(std::memory_order_acquire); }

  std::shared_ptr<Comm> comm;
  peer::CallPtr call;
  Arrays arrays;
  const char* function;
};

[[nodiscard]] std::shared_ptr<Operation> start_operation(
    const std::shared_ptr<Comm>& comm, const nb::iterable& arrays, int op,
    std::optional<std::uint64_t> tag, int level, bool rerun, const nb::bytes& structure,
    const std::string& description, Seconds timeout);

}  // namespace pccl::bindings
