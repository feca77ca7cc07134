#include "pccl/bindings/operation.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pccl::bindings {
namespace {

using Input = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using PlainInput = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using PlainOutput = nb::ndarray<nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const char* function, const char* reason) {
  raise({Code::invalid_argument, reason, {}, {}}, CallKind::collective, function);
}

Info wait(Operation& operation, Seconds timeout) {
  Signals signals;
  const peer::Limit limit{duration(timeout), signals.hook()};
  const std::shared_ptr<peer::Communicator> engine = operation.comm->engine;
  const peer::CallPtr call = operation.call;
  const char* function = operation.function;
  const Status status = [&] {
    const GilRelease release;
    return engine->wait(call, limit);
  }();
  if (operation.done()) operation.arrays.clear();
  signals.rethrow();
  if (!status) raise(status.error(), CallKind::collective, function);
  return Info(*call);
}

nb::tuple contributors(const Info& info) {
  nb::list ids;
  if (info.record != nullptr) {
    for (const wire::Member& member : info.record->members) ids.append(member.id.hex());
  }
  return nb::tuple(ids);
}

const char* function_of(int level) { return level == 1 ? "all_reduce" : "allreduce"; }

std::optional<DataType> data_type(nb::dlpack::dtype given) {
  using Kind = nb::dlpack::dtype_code;
  const auto kind = static_cast<Kind>(given.code);
  if (given.lanes != 1) return std::nullopt;
  switch (given.bits) {
    case 8:
      if (kind == Kind::Int) return DataType::int8;
      if (kind == Kind::UInt) return DataType::uint8;
      break;
    case 16:
      if (kind == Kind::Int) return DataType::int16;
      if (kind == Kind::UInt) return DataType::uint16;
      if (kind == Kind::Float) return DataType::float16;
      break;
    case 32:
      if (kind == Kind::Int) return DataType::int32;
      if (kind == Kind::UInt) return DataType::uint32;
      if (kind == Kind::Float) return DataType::float32;
      break;
    case 64:
      if (kind == Kind::Int) return DataType::int64;
      if (kind == Kind::UInt) return DataType::uint64;
      if (kind == Kind::Float) return DataType::float64;
      break;
    default:
      break;
  }
  return std::nullopt;
}

// "3,4", as pccl.tree writes a shape.
std::string extents(const PlainInput& array) {
  std::string text;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    if (axis != 0) text += ',';
    text += std::to_string(array.shape(axis));
  }
  return text;
}

// pccl.tree.structure of a tree that is this array.
std::string structure_of(const PlainInput& array, DataType type) {
  std::string text = std::string(":") + name(type) + ":(";
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    if (axis != 0) text += ", ";
    text += std::to_string(array.shape(axis));
  }
  return text + (array.ndim() == 1 ? ",)" : ")");
}

}  // namespace

Operation::~Operation() {
  if (done()) return;
  if (comm->engine->inert()) {
    new Arrays(std::move(arrays));  // a forked copy: the parent's engine has them
    return;
  }
  comm->keep(std::move(call), std::move(arrays));
}

std::shared_ptr<Operation> start_operation(const std::shared_ptr<Comm>& comm,
                                           const nb::iterable& arrays, int op,
                                           std::optional<std::uint64_t> tag, int level, bool rerun,
                                           const nb::bytes& structure,
                                           const std::string& description, Seconds timeout) {
  const char* function = function_of(level);
  comm->drop_finished();
  peer::OperationRequest request;
  Arrays in_use;
  if (op < 0 || op >= kReduceOpCount) refuse(function, "no such op");
  for (const nb::handle item : arrays) {
    const auto entry = nb::cast<nb::tuple>(item);
    if (entry.size() != 3) refuse(function, "an entry is (send, recv, dtype)");
    // Never a converted copy: results would go to the copy.
    Input send;
    Output recv;
    if (!nb::try_cast(entry[0], send, false) || !nb::try_cast(entry[1], recv, false)) {
      refuse(function, "arrays must be flat, C-contiguous views of bytes; recv writable");
    }
    const auto dtype = nb::cast<unsigned>(entry[2]);
    if (dtype >= kDataTypeCount) refuse(function, "no such dtype");
    const auto type = static_cast<DataType>(dtype);
    if (send.size() != recv.size() || send.size() % element_size(type) != 0) {
      refuse(function, "send and recv must have the same whole number of elements");
    }
    request.arrays.push_back({send.data(), recv.data(), send.size() / element_size(type), type});
    in_use.emplace_back(entry[0]);
    in_use.emplace_back(entry[1]);
  }
  request.op = static_cast<ReduceOp>(op);
  request.tag = tag;
  request.rerun = rerun;
  request.alone_is_error = level == 1;
  request.structure = XXH3_64bits(structure.c_str(), structure.size());
  request.description = description;
  Signals signals;
  const peer::Limit limit{duration(timeout), signals.hook()};
  const std::shared_ptr<peer::Communicator> engine = comm->engine;
  const Result<peer::CallPtr> call = [&] {
    const GilRelease release;
    return engine->start(std::move(request), limit);
  }();
  if (!call) {
    signals.rethrow();
    raise(call.error(), CallKind::collective, function);
  }
  return std::make_shared<Operation>(comm, *call, std::move(in_use), function);
}

std::optional<Info> reduce_plain(const std::shared_ptr<Comm>& comm, nb::handle send,
                                 nb::handle recv, int op, nb::handle tag, int level,
                                 Seconds timeout) {
  PlainInput from;
  PlainOutput to;
  // Never converted copies: results would go to the copy.
  if (!nb::try_cast(send, from, false) || !nb::try_cast(recv, to, false)) return std::nullopt;
  const std::optional<DataType> type = data_type(from.dtype());
  if (!type || from.dtype() != to.dtype() || from.size() != to.size() || from.size() == 0)
    return std::nullopt;
  if (level == 2 && !std::equal(from.shape_ptr(), from.shape_ptr() + from.ndim(), to.shape_ptr(),
                                to.shape_ptr() + to.ndim())) {
    return std::nullopt;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(from.data());
  const auto other = reinterpret_cast<std::uintptr_t>(to.data());
  const std::size_t distance = begin < other ? other - begin : begin - other;
  if (distance != 0 && distance < from.nbytes()) return std::nullopt;
  peer::OperationRequest request;
  std::uint64_t number = 0;
  if (level == 1 || !tag.is_none()) {
    if (!nb::try_cast(tag, number, false)) return std::nullopt;
    request.tag = number;
  }
  if (op < 0 || op >= kReduceOpCount) return std::nullopt;
  comm->drop_finished();
  request.arrays.push_back({from.data(), to.data(), from.size(), *type});
  request.op = static_cast<ReduceOp>(op);
  request.rerun = level == 2;
  request.alone_is_error = level == 1;
  const std::string structure = level == 1 ? std::string() : structure_of(from, *type);
  request.structure = XXH3_64bits(structure.data(), structure.size());
  request.description = name(*type) + ('[' + extents(from) + ']');
  Arrays in_use;
  in_use.emplace_back(nb::borrow(send));
  in_use.emplace_back(nb::borrow(recv));
  // Keeps the arrays, should the wait end before the operation.
  Operation operation(comm, nullptr, std::move(in_use), function_of(level));
  Signals signals;
  const peer::Limit limit{duration(timeout), signals.hook()};
  const std::shared_ptr<peer::Communicator> engine = comm->engine;
  const Status status = [&] {
    const GilRelease release;
    return engine->reduce(std::move(request), limit,
                          [&](const peer::CallPtr& call) { operation.call = call; });
  }();
  signals.rethrow();
  if (!status) raise(status.error(), CallKind::collective, operation.function);
  return Info(*operation.call);
}

void bind_operation(nb::module_& m) {
  nb::class_<Info>(m, "ReduceInfo")
      .def_prop_ro(
          "world_size",
          [](const Info& info) { return info.record == nullptr ? 0 : info.record->members.size(); })
      .def_prop_ro("contributors", &contributors)
      .def_prop_ro("epoch",
                   [](const Info& info) { return info.record == nullptr ? 0 : info.record->epoch; })
      .def_ro("attempts", &Info::attempts)
      .def_ro("tx_bytes", &Info::tx_bytes)
      .def_ro("rx_bytes", &Info::rx_bytes);
  nb::class_<Operation>(m, "Operation")
      .def("wait", &wait, nb::arg("timeout").none())
      .def("done", &Operation::done);
}

}  // namespace pccl::bindings
