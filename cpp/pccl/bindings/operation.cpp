#include "pccl/bindings/operation.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

namespace pccl::bindings {
namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// After a wait: the operation's outcome, or its failure raised.
Info end(OperationHandle& operation, const peer::CallPtr& call, Signals& signals,
         const Status& status) {
  if (operation.done()) operation.arrays.clear();
  signals.rethrow();
  if (!status) raise(status.error(), CallKind::collective, operation.function);
  return Info(*call);
}

Info await(OperationHandle& operation, Seconds timeout) {
  Signals signals;
  const peer::CallPtr call = operation.call;
  const Status status =
      without_gil(*operation.comm, signals, timeout,
                  [&](auto& engine, const auto& limit) { return engine.wait(call, limit); });
  return end(operation, call, signals, status);
}

}  // namespace

const char* function_of(int level, collective::Kind kind) {
  switch (kind) {
    case collective::Kind::all_reduce:
      return level == 1 ? "all_reduce" : "allreduce";
    case collective::Kind::all_gather:
      return level == 1 ? "all_gather" : "allgather";
    case collective::Kind::all_to_all:
      return level == 1 ? "all_to_all" : "alltoall";
    case collective::Kind::reduce_scatter:
    case collective::Kind::broadcast:
      break;
  }
  return collective::name(kind);
}

void quantize(peer::OperationRequest& request, const Quantized& how, const char* function) {
  const auto& [code, zero_exact, stochastic, block] = how;
  request.quantization = {static_cast<reduce::CodeType>(code), zero_exact, stochastic, block};
  if (code > 3 || !reduce::valid(request.quantization)) refuse(function, "no such codes");
  if (request.kind != collective::Kind::all_reduce || request.op == ReduceOp::prod)
    refuse(function, "only all-reduces are quantized, and no products");
}

OperationHandle::~OperationHandle() {
  if (done()) return;
  if (comm->engine->inert()) {
    new Arrays(std::move(arrays));  // never freed: they belong to the parent's engine
    return;
  }
  comm->keep(std::move(call), std::move(arrays));
}

std::shared_ptr<OperationHandle> start_operation(
    const std::shared_ptr<CommunicatorHandle>& comm, const nb::iterable& arrays, int op,
    std::optional<std::uint64_t> tag, int level, bool rerun, const nb::bytes& structure,
    const std::string& description, Seconds timeout, int kind, std::uint32_t root,
    std::uint32_t parts, const std::optional<Quantized>& quantized, const nb::iterable& residuals,
    std::uint32_t residual_members, bool any_thread, bool wait, const nb::object& kept) {
  peer::OperationRequest request;
  request.kind = static_cast<collective::Kind>(kind);
  const char* function = function_of(level, request.kind);
  Arrays in_use;
  if (op < 0 || op >= kReduceOpCount) refuse(function, "no such op");
  if (kind < 0 || kind >= collective::kKindCount) refuse(function, "no such collective");
  // The arrays' lengths, in parts.
  const std::uint64_t sends = collective::scatters(request.kind) ? parts : 1;
  const std::uint64_t recvs = collective::gathers(request.kind) ? parts : 1;
  for (const nb::handle item : arrays) {
    const auto entry = nb::cast<nb::tuple>(item);
    if (entry.size() != 3) refuse(function, "an entry is (send, recv, dtype)");
    // No implicit conversion, which would make a copy: results would go to the copy.
    Input send;
    Output recv;
    if (!nb::try_cast(entry[0], send, false) || !nb::try_cast(entry[1], recv, false)) {
      refuse(function, "arrays must be flat, C-contiguous views of bytes; recv writable");
    }
    const auto dtype = nb::cast<unsigned>(entry[2]);
    if (dtype >= kDataTypeCount) refuse(function, "no such dtype");
    const auto type = static_cast<DataType>(dtype);
    const bool reduces = request.kind == collective::Kind::all_reduce ||
                         request.kind == collective::Kind::reduce_scatter;
    if (reduces && !combines(type, static_cast<ReduceOp>(op)))
      refuse(function, std::string("no ") + name(static_cast<ReduceOp>(op)) + " of " + name(type));
    const std::size_t bytes = send.size() / std::max<std::uint64_t>(sends, 1);
    if (send.size() != bytes * sends || recv.size() != bytes * recvs ||
        bytes % element_size(type) != 0) {
      refuse(function, "send and recv must fit together, in whole numbers of elements");
    }
    request.arrays.push_back({send.data(), recv.data(), bytes / element_size(type), type});
    in_use.emplace_back(nb::object(entry[0]));
    in_use.emplace_back(nb::object(entry[1]));
  }
  request.op = static_cast<ReduceOp>(op);
  if (quantized) quantize(request, *quantized, function);
  std::size_t next = 0;
  for (const nb::handle item : residuals) {
    const std::size_t index = next++;
    if (item.is_none()) continue;
    Output residual;
    if (index >= request.arrays.size() || !nb::try_cast(item, residual, false))
      refuse(function, "residuals must be flat, C-contiguous, writable views of bytes");
    collective::ArrayRef& array = request.arrays[index];
    const DataType work = accumulation_type(array.dtype, static_cast<ReduceOp>(op));
    if (residual.size() != array.count * element_size(work))
      refuse(function, "a residual must fit its array");
    array.residual = residual.data();
    array.residual_members = residual_members;
    in_use.emplace_back(nb::borrow(item));
  }
  if (!kept.is_none()) in_use.emplace_back(kept);
  request.root = root;
  request.parts = parts;
  request.tag = tag;
  request.rerun = rerun;
  request.alone_is_error = level == 1;
  request.any_thread = any_thread;
  request.structure = XXH3_64bits(structure.c_str(), structure.size());
  request.description = description;
  if (wait) {
    comm->drop_finished();
    auto operation = std::make_shared<OperationHandle>(comm, nullptr, std::move(in_use), function);
    (void)carry_out(*operation, std::move(request), timeout);
    return operation;
  }
  return launch(comm, std::move(request), std::move(in_use), function, timeout);
}

std::shared_ptr<OperationHandle> launch(const std::shared_ptr<CommunicatorHandle>& comm,
                                        peer::OperationRequest request, Arrays in_use,
                                        const char* function, const Seconds& timeout) {
  comm->drop_finished();
  Signals signals;
  const Result<peer::CallPtr> call = without_gil(
      *comm, signals, timeout,
      [&](auto& engine, const auto& limit) { return engine.start(std::move(request), limit); });
  // The handle keeps the arrays, also when it is dropped because of an exception.
  auto operation =
      std::make_shared<OperationHandle>(comm, call ? *call : nullptr, std::move(in_use), function);
  signals.rethrow();
  if (!call) raise(call.error(), CallKind::collective, function);
  return operation;
}

Info carry_out(OperationHandle& operation, peer::OperationRequest request, const Seconds& timeout) {
  Signals signals;
  const Status status =
      without_gil(*operation.comm, signals, timeout, [&](auto& engine, const auto& limit) {
        return engine.reduce(std::move(request), limit,
                             [&](const peer::CallPtr& call) { operation.call = call; });
      });
  return end(operation, operation.call, signals, status);
}

void bind_operation(nb::module_& m) {
  nb::class_<Info>(m, "ReduceInfo")
      .def_prop_ro(
          "world_size",
          [](const Info& info) { return info.record == nullptr ? 0 : info.record->members.size(); })
      .def_prop_ro("contributors",
                   [](const Info& info) { return nb::tuple(nb::cast(ids_of(info.record))); })
      .def_prop_ro("epoch",
                   [](const Info& info) { return info.record == nullptr ? 0 : info.record->epoch; })
      .def_ro("attempts", &Info::attempts)
      .def_ro("tx_bytes", &Info::tx_bytes)
      .def_ro("rx_bytes", &Info::rx_bytes)
      .def_ro("bytes", &Info::bytes)
      .def_prop_ro("seconds", [](const Info& info) { return in_seconds(info.spent.total()); })
      .def_prop_ro("waiting_seconds",
                   [](const Info& info) { return in_seconds(info.spent.waiting); })
      .def_prop_ro("moving_seconds",
                   [](const Info& info) { return in_seconds(info.spent.moving); });
  nb::class_<OperationHandle>(m, "Operation")
      .def("wait", &await, nb::arg("timeout").none())
      .def("done", &OperationHandle::done)
      .def("contributors", &OperationHandle::contributors);
}

}  // namespace pccl::bindings
