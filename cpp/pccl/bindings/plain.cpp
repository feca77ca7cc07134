#include "pccl/bindings/plain.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>

namespace pccl::bindings {
namespace {

using PlainInput = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using PlainOutput = nb::ndarray<nb::c_contig, nb::device::cpu>;

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

// What is looked up once. Never freed: the interpreter may be gone before static objects are.
struct Python {
  nb::object ndarray = nb::module_::import_("numpy").attr("ndarray");
  nb::object op_codes = nb::module_::import_("pccl.types").attr("OP_CODES");
  nb::object reduce_op = nb::module_::import_("pccl.types").attr("ReduceOp");
  nb::object reduce_info = nb::module_::import_("pccl.types").attr("ReduceInfo");
  nb::object local_world_size = nb::str("local_world_size");
  nb::object tx_bytes = nb::str("tx_bytes");
  nb::object rx_bytes = nb::str("rx_bytes");
  nb::object contributors = nb::str("contributors");
  nb::object epoch = nb::str("epoch");
  nb::object attempts = nb::str("attempts");
};

const Python& python() {
  static const Python* const found = new Python;
  return *found;
}

// A pccl.types.ReduceInfo. Not by its constructor: that of a frozen dataclass takes as long as a
// small reduction.
nb::object reduce_info(Comm& comm, const Info& info) {
  const Python& py = python();
  nb::object made =
      nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(py.reduce_info.ptr()), 0));
  if (!made.is_valid()) throw nb::python_error();
  const auto set = [&](const nb::object& name, const nb::object& value) {
    if (PyObject_GenericSetAttr(made.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
  };
  const bool known = info.record != nullptr;
  if (!comm.contributors.is_valid() || comm.contributors_of != info.record) {
    comm.contributors = contributors(info.record);
    comm.contributors_of = info.record;
  }
  set(py.local_world_size, nb::int_(known ? info.record->members.size() : 0));
  set(py.tx_bytes, nb::int_(info.tx_bytes));
  set(py.rx_bytes, nb::int_(info.rx_bytes));
  set(py.contributors, comm.contributors);
  set(py.epoch, nb::int_(known ? info.record->epoch : 0));
  set(py.attempts, nb::int_(info.attempts));
  return made;
}

// The op's code, or -1 when it takes longer to tell.
int code_of(nb::handle op) {
  const Python& py = python();
  if (!op.type().is(py.reduce_op) && PyUnicode_CheckExact(op.ptr()) == 0) return -1;
  PyObject* const code = PyDict_GetItemWithError(py.op_codes.ptr(), op.ptr());
  if (code != nullptr) return static_cast<int>(PyLong_AsLong(code));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return -1;
}

constexpr const char* kAllReduce = R"(Reduces `send` over all members into `recv`, and waits.

Args:
    send: NumPy array (or CPU torch tensor) of numbers, any shape. Unchanged, unless `recv`
        is the same memory.
    recv: Array of the same kind, dtype and number of elements. May be `send`: after a
        failure it is as before.
    op: How elements are combined.
    tag: Members' calls with equal tags meet, in the order of each member's calls.
    operand_descriptor: Default: the arrays' own dtype. Another dtype is refused.
    quantization_options: Only None or the algorithm NONE yet.
    timeout: Seconds for the whole call. None waits as long as members make progress.

Raises:
    TooFewPeers: Alone in the group.
    PeerLost: A member was lost (RANK_CONNECTION_LOST); update the topology and call again.
    MismatchedCall: Members disagree on count, dtype or op.
    InvalidArgument: The arrays do not fit together.)";

// The base of pccl.Communicator, for the one method that is native.
struct Reducer {
  std::shared_ptr<Comm> engine;  // null: every call goes the long way, where errors are told
};

// What is not plain, or wrong, is left to the long way, which is written in Python.
nb::object all_reduce(Reducer& self, nb::handle send, nb::handle recv, nb::handle op,
                      nb::handle tag, nb::handle operand, nb::handle quantization,
                      nb::handle timeout) {
  const Python& py = python();
  Seconds seconds;
  bool plain = self.engine != nullptr && !self.engine->engine->inert() && operand.is_none() &&
               quantization.is_none() && send.type().is(py.ndarray) && recv.type().is(py.ndarray);
  if (timeout.is_none()) {
    plain = plain && std::getenv("PCCL_TIMEOUT") == nullptr;
  } else {
    double given = -1;
    if (PyFloat_CheckExact(timeout.ptr()) || PyLong_CheckExact(timeout.ptr())) {
      given = PyFloat_AsDouble(timeout.ptr());
      PyErr_Clear();  // too large an integer: -1
    }
    plain = plain && given >= 0 && std::isfinite(given);
    seconds = given;
  }
  if (const int code = plain ? code_of(op) : -1; code >= 0) {
    const std::shared_ptr<Comm> comm = self.engine;  // another thread may close it
    if (const auto info = reduce_plain(comm, send, recv, code, tag, 1, seconds))
      return reduce_info(*comm, *info);
  }
  return nb::find(self).attr("_all_reduce")(send, recv, op, tag, operand, quantization, timeout);
}

}  // namespace

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

void bind_plain(nb::module_& m) {
  nb::class_<Reducer>(m, "Reducer")
      .def(nb::init<>())
      .def(
          "_attach",
          [](Reducer& self, nb::handle engine) {
            if (!nb::try_cast(engine, self.engine, false)) self.engine = nullptr;
          },
          nb::arg("engine").none())
      .def("all_reduce", &all_reduce, nb::arg("send").none(), nb::arg("recv").none(), nb::kw_only(),
           nb::arg("op").none(), nb::arg("tag").none() = 0,
           nb::arg("operand_descriptor") = nb::none(), nb::arg("quantization_options") = nb::none(),
           nb::arg("timeout") = nb::none(),
           nb::sig("def all_reduce(self, send, recv, *, op, tag=0, operand_descriptor=None, "
                   "quantization_options=None, timeout=None)"),
           kAllReduce);
}

}  // namespace pccl::bindings
