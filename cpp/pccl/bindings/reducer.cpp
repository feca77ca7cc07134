// The fast path of reductions, and the base class of pccl.Communicator.
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "pccl/bindings/operation.h"
#include "pccl/bindings/plain.h"

namespace pccl::bindings {
namespace {

// Looked up once.
struct Python {
  nb::object op_codes = nb::module_::import_("pccl.types").attr("OP_CODES");
  nb::object reduce_op = nb::module_::import_("pccl.types").attr("ReduceOp");
  nb::object reduce_info = nb::module_::import_("pccl.types").attr("ReduceInfo");
  nb::object local_world_size = nb::str("local_world_size");
  nb::object tx_bytes = nb::str("tx_bytes");
  nb::object rx_bytes = nb::str("rx_bytes");
  nb::object contributors = nb::str("contributors");
  nb::object epoch = nb::str("epoch");
  nb::object attempts = nb::str("attempts");
  nb::object bytes = nb::str("bytes");
  nb::object seconds = nb::str("seconds");
  nb::object waiting_seconds = nb::str("waiting_seconds");
  nb::object moving_seconds = nb::str("moving_seconds");
};

// A pccl.types.ReduceInfo. Made without its constructor: that of a frozen dataclass takes as long
// as a small reduction.
nb::object reduce_info(CommunicatorHandle& comm, const Info& info) {
  const auto& py = immortal<Python>();
  nb::object made =
      nb::steal(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(py.reduce_info.ptr()), 0));
  if (!made.is_valid()) throw nb::python_error();
  const nb::object fields = nb::steal(PyObject_GenericGetDict(made.ptr(), nullptr));
  if (!fields.is_valid()) throw nb::python_error();
  const auto set = [&](const nb::object& name, const nb::object& value) {
    if (PyDict_SetItem(fields.ptr(), name.ptr(), value.ptr()) != 0) throw nb::python_error();
  };
  const bool known = info.record != nullptr;
  if (!comm.contributors.is_valid() || comm.contributors_of != info.record) {
    comm.contributors = nb::tuple(nb::cast(ids_of(info.record)));
    comm.contributors_of = info.record;
  }
  set(py.local_world_size, nb::int_(known ? info.record->members.size() : 0));
  set(py.tx_bytes, nb::int_(info.tx_bytes));
  set(py.rx_bytes, nb::int_(info.rx_bytes));
  set(py.contributors, comm.contributors);
  set(py.epoch, nb::int_(known ? info.record->epoch : 0));
  set(py.attempts, nb::int_(info.attempts));
  set(py.bytes, nb::int_(info.bytes));
  set(py.seconds, nb::float_(in_seconds(info.spent.total())));
  set(py.waiting_seconds, nb::float_(in_seconds(info.spent.waiting)));
  set(py.moving_seconds, nb::float_(in_seconds(info.spent.moving)));
  return made;
}

// The op's code, or -1 if only the general path can tell.
int code_of(nb::handle op) {
  const auto& py = immortal<Python>();
  if (!op.type().is(py.reduce_op) && PyUnicode_CheckExact(op.ptr()) == 0) return -1;
  PyObject* const code = PyDict_GetItemWithError(py.op_codes.ptr(), op.ptr());
  if (code != nullptr) return static_cast<int>(PyLong_AsLong(code));
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return -1;
}

// Fills in the request's other fields. False: the tag or the op is invalid.
bool complete(Plain& plain, int op, nb::handle tag, int level) {
  std::uint64_t number = 0;
  if (level == 1 || !tag.is_none()) {
    if (!nb::try_cast(tag, number, false)) return false;
    plain.request.tag = number;
  }
  if (op < 0 || op >= kReduceOpCount) return false;
  plain.request.op = static_cast<ReduceOp>(op);
  for (const collective::ArrayRef& array : plain.request.arrays) {
    if (collective::reduces(plain.request.kind) && !combines(array.dtype, plain.request.op))
      return false;
  }
  plain.request.rerun = level == 2;
  plain.request.alone_is_error = level == 1;
  return true;
}

// The request of an all-reduce of the simple API. Nothing: the general path can tell why.
std::optional<Plain> whole_tree(nb::handle tree, nb::handle out, nb::handle op, nb::handle tag,
                                const Coding& coding) {
  const int code = code_of(op);
  if (code < 0) return std::nullopt;
  std::optional<Plain> plain =
      plain_tree(tree, out, coding ? std::string_view(coding->second) : std::string_view());
  if (!plain || !complete(*plain, code, tag, 2)) return std::nullopt;
  if (coding) quantize(plain->request, coding->first, function_of(2));
  return plain;
}

Info run(const std::shared_ptr<CommunicatorHandle>& comm, Plain plain, const Seconds& timeout) {
  comm->drop_finished();
  const int level = plain.request.alone_is_error ? 1 : 2;
  // Keeps the arrays if the wait ends before the operation.
  OperationHandle operation(comm, nullptr, std::move(plain.in_use),
                            function_of(level, plain.request.kind));
  return carry_out(operation, std::move(plain.request), timeout);
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
    quantization_options: Members must ask for the same. Between hosts,
        floating-point arrays of 64 elements and more travel in these fewer bits.
    timeout: Seconds for the whole call. None waits as long as members make progress.

Raises:
    TooFewPeers: Alone in the group.
    PeerLost: A member was lost (RANK_CONNECTION_LOST); update the topology and call again.
    MismatchedCall: Members disagree on count, dtype or op.
    InvalidArgument: The arrays do not fit together.)";

// The base class of pccl.Communicator, which has its one native method.
struct Reducer {
  Reducer() = default;
  ~Reducer() { attach(nullptr); }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  void attach(std::shared_ptr<CommunicatorHandle> comm) {
    engine = std::move(comm);
    enlist_communicator(number, engine == nullptr ? nullptr : engine->engine);
  }

  std::shared_ptr<CommunicatorHandle> engine;  // null: the general path makes the error
  const std::int64_t number = next_communicator();
};

// Leaves other arrays, and errors, to the general path, which is written in Python.
nb::object all_reduce(Reducer& self, nb::handle send, nb::handle recv, nb::handle op,
                      nb::handle tag, nb::handle operand, nb::handle quantization,
                      nb::handle timeout) {
  Seconds seconds;
  const std::shared_ptr<CommunicatorHandle> comm =
      self.engine;  // another thread may close it meanwhile
  bool plain =
      comm != nullptr && !comm->engine->inert() && operand.is_none() && quantization.is_none();
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
    std::optional<Plain> pair = plain_pair(send, recv);
    if (pair && complete(*pair, code, tag, 1))
      return reduce_info(*comm, run(comm, std::move(*pair), seconds));
  }
  return call_with(get_attribute(nb::find(self), "_all_reduce"), send, recv, op, tag, operand,
                   quantization, timeout);
}

}  // namespace

std::optional<std::pair<nb::object, Info>> reduce_tree(
    const std::shared_ptr<CommunicatorHandle>& comm, nb::handle tree, nb::handle out, nb::handle op,
    nb::handle tag, Seconds timeout, const Coding& coding) {
  std::optional<Plain> plain = whole_tree(tree, out, op, tag, coding);
  if (!plain) return std::nullopt;
  Held result = std::move(plain->result);
  const Info info = run(comm, std::move(*plain), timeout);
  return std::pair(result.take(), info);
}

std::optional<std::pair<std::shared_ptr<OperationHandle>, nb::object>> start_tree(
    const std::shared_ptr<CommunicatorHandle>& comm, nb::handle tree, nb::handle out, nb::handle op,
    nb::handle tag, Seconds timeout, const Coding& coding) {
  std::optional<Plain> plain = whole_tree(tree, out, op, tag, coding);
  if (!plain) return std::nullopt;
  Held result = std::move(plain->result);
  auto operation =
      launch(comm, std::move(plain->request), std::move(plain->in_use), function_of(2), timeout);
  return std::pair(std::move(operation), result.take());
}

namespace {

// As of the last call; 0: this peer is no member.
std::uint32_t member_count(const CommunicatorHandle& comm) {
  const auto view = comm.engine->view();
  if (!view || view->record == nullptr) return 0;
  const std::vector<wire::Member>& members = view->record->members;
  const bool in = std::ranges::any_of(
      members, [&](const wire::Member& member) { return member.id == comm.engine->id(); });
  return in ? static_cast<std::uint32_t>(members.size()) : 0;
}

}  // namespace

std::optional<std::pair<nb::object, Info>> collect(const std::shared_ptr<CommunicatorHandle>& comm,
                                                   int kind, int level, nb::handle array,
                                                   nb::handle out, int op, nb::handle root,
                                                   nb::handle tag, Seconds timeout) {
  using collective::Kind;
  const auto which = static_cast<Kind>(kind);
  const std::uint32_t members = member_count(*comm);
  std::optional<Plain> plain = plain_parts(which, members, array, out, level == 2);
  if (!plain || !complete(*plain, op, tag, level)) return std::nullopt;
  peer::OperationRequest& request = plain->request;
  if (which == Kind::broadcast) {
    if (!nb::try_cast(root, request.root, false) || request.root >= members) return std::nullopt;
    if (level == 2) request.parts = 0;  // it fits any number of members
  }
  const bool into = which == Kind::all_gather && level == 2 && !out.is_none();
  if (into) request.description += " to `out`";
  // The caller's arrays fit only this number of members, so such a call is not run again.
  request.rerun = level == 2 && !collective::scatters(which) && !into;
  Held result = std::move(plain->result);
  const Info info = run(comm, std::move(*plain), timeout);
  const std::size_t left = info.record == nullptr ? members : info.record->members.size();
  if (which == Kind::all_gather && left < members)  // it ran again after a loss
    result = Held(result.get()[nb::slice(left)].attr("copy")());
  return std::pair(result.take(), info);
}

void bind_reducer(nb::module_& m) {
  nb::class_<Reducer>(m, "Reducer")
      .def(nb::init<>())
      .def_ro("_number", &Reducer::number)
      .def(
          "_attach",
          [](Reducer& self, nb::handle engine) {
            std::shared_ptr<CommunicatorHandle> comm;
            self.attach(nb::try_cast(engine, comm, false) ? std::move(comm) : nullptr);
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
