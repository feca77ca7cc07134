"""Enums and descriptors of the explicit API: pypccl's names and values, and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.errors import InvalidArgument, InvalidUsage, NotSupported, Result

__all__ = [
    "Attribute",
    "DataType",
    "Departure",
    "DeviceType",
    "DistributionHint",
    "MembershipChange",
    "QuantizationAlgorithm",
    "QuantizationOptions",
    "ReduceDescriptor",
    "ReduceInfo",
    "RunStats",
    "Schedule",
    "ReduceOp",
    "ReduceOpDescriptor",
    "ReduceOperandDescriptor",
    "Result",
    "SharedState",
    "SharedStateSyncInfo",
    "SharedStateSyncStrategy",
    "SyncInfo",
    "TensorInfo",
    "Topology",
]


class ReduceOp(IntEnum):
    """How elements are combined."""

    SUM = 0
    AVG = 1  # divides by the members that contributed; integers round toward zero
    PROD = 2
    MAX = 3
    MIN = 4

    @classmethod
    def parse(cls, op: ReduceOp | str | int, func: str) -> ReduceOp:
        """The op that `op` names: a member, or "sum", "avg" (or "mean"), "prod", "min", "max".

        Raises:
            InvalidArgument: It names none.
        """
        try:
            if isinstance(op, str):
                return cls["AVG" if op == "mean" else op.upper()]
            if isinstance(op, int | np.integer) and not isinstance(op, bool):
                return cls(int(op))
        except (KeyError, ValueError):
            pass
        is_array = hasattr(op, "shape") and not isinstance(op, np.generic)
        shown = "an array; outputs go to out=" if is_array else repr(op)
        sentence = f"op must be a ReduceOp, or sum, avg (mean), prod, min or max, not {shown}"
        raise InvalidArgument.because(func, sentence)


# Of the usual spellings, for calls that cannot wait for `ReduceOp.parse`.
OP_CODES: Mapping[ReduceOp | str, int] = {
    **{op: int(op) for op in ReduceOp},
    **{op.name.lower(): int(op) for op in ReduceOp},
    "mean": int(ReduceOp.AVG),
}


class Attribute(IntEnum):
    """What `Communicator.get_attribute` can tell: numbers of peers and groups."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class DataType(IntEnum):
    """Element types that can be reduced."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    UINT16 = 3
    UINT32 = 4
    INT32 = 5
    UINT64 = 6
    INT64 = 7
    FLOAT16 = 8
    BFLOAT16 = 9
    FLOAT = 10
    DOUBLE = 11
    BOOL = 12
    FLOAT8_E4M3FN = 13
    FLOAT8_E5M2 = 14
    COMPLEX64 = 15
    COMPLEX128 = 16

    @property
    def label(self) -> str:
        """The name that NumPy, JAX and torch share, e.g. "float32"."""
        return _LABELS[self]

    @property
    def size(self) -> int:
        """Bytes per element."""
        return _SIZES[self]

    def combines(self, op: ReduceOp) -> bool:
        """Whether elements can be combined so.

        Booleans have MAX ("or") and MIN ("and"), complex numbers SUM and AVG, all others every op.
        """
        return self not in _OPS or op in _OPS[self]

    def to_numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype.

        Raises:
            NotSupported: BFLOAT16 or an 8-bit float in a program that has not imported
                `ml_dtypes` (or jax): NumPy alone lacks them.
        """
        try:
            return np.dtype(self.label)
        except TypeError:
            sentence = f"NumPy knows {self.label} only after `import ml_dtypes`"
            raise NotSupported.because("to_numpy_dtype", sentence) from None

    def to_torch_dtype(self) -> Any:
        """The torch dtype. Imports torch."""
        import torch

        return getattr(torch, self.label)

    @classmethod
    def from_numpy_dtype(cls, dtype: npt.DTypeLike) -> DataType:
        """The element type of a NumPy dtype; those of ml_dtypes are known by their names.

        Raises:
            NotSupported: A known numeric dtype that is not there yet (float8_e4m3b11fnuz, int4,
                longdouble, big-endian numbers, ...).
            InvalidArgument: Not a number type that can be reduced (text, dates, objects, ...).
        """
        return _of_numpy(np.dtype(dtype))

    @classmethod
    def from_torch_dtype(cls, dtype: Any) -> DataType:
        """The element type of a torch dtype. Does not import torch.

        Raises:
            NotSupported, InvalidArgument: As in `from_numpy_dtype`.
        """
        label = str(dtype).removeprefix("torch.")
        found = _BY_LABEL.get(label)
        if found is None:
            raise _unfit_dtype(label, "from_torch_dtype")
        return found


# NumPy takes 3 us to make a dtype's name, so calls look it up once.
@lru_cache(maxsize=256)
def _of_numpy(given: np.dtype[Any]) -> DataType:
    found = _BY_LABEL.get(given.name)
    if found is None:
        raise _unfit_dtype(given.name, "from_numpy_dtype")
    if not given.isnative:
        sentence = f"byte order {given.str!r} is foreign; convert it to the native one"
        raise NotSupported.because("from_numpy_dtype", sentence)
    return found


_LABELS = {dtype: dtype.name.lower() for dtype in DataType}
_LABELS |= {DataType.FLOAT: "float32", DataType.DOUBLE: "float64"}
_BY_LABEL = {label: dtype for dtype, label in _LABELS.items()}
_SIZES = dict(zip(DataType, (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1, 1, 8, 16), strict=True))
# The ops of the types that do not have all of them.
_OPS = {
    DataType.BOOL: (ReduceOp.MAX, ReduceOp.MIN),
    DataType.COMPLEX64: (ReduceOp.SUM, ReduceOp.AVG),
    DataType.COMPLEX128: (ReduceOp.SUM, ReduceOp.AVG),
}


def check_op(dtype: DataType, op: ReduceOp, func: str) -> None:
    """Refuses elements that cannot be combined so.

    Raises:
        InvalidArgument: They cannot.
    """
    if not dtype.combines(op):
        known = " or ".join(f'"{known.name.lower()}"' for known in _OPS[dtype])
        sentence = f'dtype {dtype.label} is combined with {known}, not with "{op.name.lower()}"'
        raise InvalidArgument.because(func, sentence)


def _unfit_dtype(label: str, func: str) -> InvalidArgument | NotSupported:
    if label.startswith(("float", "int", "uint", "longdouble", "clongdouble", "complex")):
        return NotSupported.because(func, f"dtype {label} is not supported yet")
    return InvalidArgument.because(func, f"dtype {label} cannot be reduced")


class DeviceType(IntEnum):
    """Where memory lives."""

    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> DeviceType | None:
        """The member for torch's `device.type`; None for devices that pccl does not know."""
        return cls.__members__.get(device_type.upper())


class DistributionHint(IntEnum):
    """How values are probably distributed; only a hint."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class QuantizationAlgorithm(IntEnum):
    """How values are made smaller on the wire."""

    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2


class SharedStateSyncStrategy(IntEnum):
    """A peer's part in an explicit-API shared-state synchronisation."""

    ENFORCE_POPULAR = 0
    RECEIVE_ONLY = 1
    SEND_ONLY = 2


@dataclass
class ReduceOperandDescriptor:
    """The element type of an operand."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass
class QuantizationOptions:
    """How an operand travels."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX


@dataclass
class ReduceDescriptor:
    """One reduction without its memory.

    Attributes:
        count: Number of elements.
        op: How they are combined.
        tag: Names the operation: members' calls with equal tags meet.
        operand_descriptor: What the elements are.
        quantization_options: How they travel.
    """

    count: int
    op: ReduceOp
    tag: int
    operand_descriptor: ReduceOperandDescriptor
    quantization_options: QuantizationOptions = field(
        default_factory=lambda: QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
    )


class ReduceOpDescriptor:
    """One reduction with its memory, for `Communicator.all_reduce_multiple_with_retry`.

    Args:
        sendbuf_ptr: Address of `reduce_descriptor.count` contiguous input elements in CPU memory.
            The caller keeps them alive and unchanged until the reduction is over.
        recvbuf_ptr: Address of as many output elements; may equal `sendbuf_ptr` (in place).
        reduce_descriptor: The rest.

    `from_numpy` and `from_torch` keep their arrays alive by themselves. Each call takes the memory
    that a tensor has at that time, on any device; its size and dtype must fit as before.
    """

    def __init__(
        self, sendbuf_ptr: int, recvbuf_ptr: int, reduce_descriptor: ReduceDescriptor
    ) -> None:
        if reduce_descriptor.count < 0:
            raise InvalidArgument.because("ReduceOpDescriptor", "count is negative")
        if reduce_descriptor.count and not (sendbuf_ptr and recvbuf_ptr):
            raise InvalidArgument.because("ReduceOpDescriptor", "a buffer's address is null")
        self.sendbuf_ptr = int(sendbuf_ptr or 0)
        self.recvbuf_ptr = int(recvbuf_ptr or 0)
        self.reduce_descriptor = reduce_descriptor
        self._kept: tuple[object, ...] = ()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._kept:  # those of a deep copy are elsewhere
            self.sendbuf_ptr, self.recvbuf_ptr = map(_address_of, self._kept)

    @staticmethod
    def from_numpy(
        send: npt.NDArray[Any], recv: npt.NDArray[Any], reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        """Reduces the first `reduce_descriptor.count` elements of `send` into `recv`.

        Args:
            send: C-contiguous array.
            recv: C-contiguous writable array of the same dtype and size; may be `send`.
            reduce_descriptor: Its data type must be the arrays'.

        Raises:
            InvalidArgument: The arrays or the descriptor do not fit together.
        """
        func = "ReduceOpDescriptor.from_numpy"
        for name, array in (("send", send), ("recv", recv)):
            if not isinstance(array, np.ndarray):
                raise InvalidArgument.because(func, f"{name} is no NumPy array")
        return ReduceOpDescriptor._keeping(func, send, recv, reduce_descriptor)

    @staticmethod
    def from_torch(send: Any, recv: Any, reduce_descriptor: ReduceDescriptor) -> ReduceOpDescriptor:
        """As `from_numpy`, for contiguous tensors on one device.

        A `recv` on an accelerator is written when the reduction is over.

        Raises:
            NotSupported: They have no elements (device "meta").
        """
        func = "ReduceOpDescriptor.from_torch"
        return ReduceOpDescriptor._keeping(func, send, recv, reduce_descriptor)

    @staticmethod
    def _keeping(
        func: str, send: Any, recv: Any, reduce_descriptor: ReduceDescriptor
    ) -> ReduceOpDescriptor:
        _check_pair(func, send, recv, reduce_descriptor)
        addresses = _address_of(send), _address_of(recv)
        descriptor = ReduceOpDescriptor(*addresses, reduce_descriptor)
        descriptor._kept = (send, recv)
        return descriptor

    def _check_kept(self, func: str) -> None:
        """Looks again at the arrays that it was made from, and where they are now.

        `set_`, `data =` and `Module.to` change a tensor's memory and device.
        """
        if self._kept:
            send, recv = self._kept
            _check_pair(func, send, recv, self.reduce_descriptor)
            self.sendbuf_ptr, self.recvbuf_ptr = _address_of(send), _address_of(recv)


def _address_of(array: Any) -> int:
    """Where a NumPy array or torch tensor has its elements."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def _check_pair(func: str, send: Any, recv: Any, what: ReduceDescriptor) -> None:
    """Refuses two NumPy arrays, or two tensors, that a descriptor cannot have.

    Raises:
        InvalidArgument: They do not fit together or the descriptor.
        NotSupported: They have no elements (device "meta").
    """
    if isinstance(send, np.ndarray):
        for name, array in (("send", send), ("recv", recv)):
            if not array.flags.c_contiguous:
                raise InvalidArgument.because(func, f"{name} is not C-contiguous")
        if not recv.flags.writeable:
            raise InvalidArgument.because(func, "recv is read-only")
        kinds = DataType.from_numpy_dtype(send.dtype), DataType.from_numpy_dtype(recv.dtype)
        return check_operands(func, kinds, (send.size, recv.size), what)
    for name, tensor in (("send", send), ("recv", recv)):
        _check_torch(func, name, tensor)
    if send.device != recv.device:
        sentence = f"send is on {send.device}, but recv is on {recv.device}"
        raise InvalidArgument.because(func, sentence)
    kinds = DataType.from_torch_dtype(send.dtype), DataType.from_torch_dtype(recv.dtype)
    check_operands(func, kinds, (send.numel(), recv.numel()), what)


def check_operands(
    func: str,
    kinds: tuple[DataType, DataType],
    sizes: tuple[int, int],
    what: ReduceDescriptor | ReduceOperandDescriptor | None,
) -> None:
    """Refuses a pair of arrays, (send, recv), that does not fit together or the descriptor.

    Raises:
        InvalidArgument: It does not.
    """
    sentence = ""
    operand = what.operand_descriptor if isinstance(what, ReduceDescriptor) else what
    if kinds[0] != kinds[1]:
        sentence = f"send is {kinds[0].label}, but recv is {kinds[1].label}"
    elif sizes[0] != sizes[1]:
        sentence = f"send has {sizes[0]} elements, but recv has {sizes[1]}"
    elif operand is not None and operand.datatype != kinds[0]:
        declared = DataType(operand.datatype).label
        sentence = f"the descriptor says {declared}, but the data is {kinds[0].label}"
    elif isinstance(what, ReduceDescriptor) and what.count > sizes[0]:
        sentence = f"count is {what.count}, but there are {sizes[0]} elements"
    if sentence:
        raise InvalidArgument.because(func, sentence)


def _check_torch(func: str, name: str, tensor: Any) -> None:
    if any(base.__name__ == "DTensor" for base in type(tensor).__mro__):
        raise InvalidArgument.because(func, f"{name} is a DTensor; pass its local tensor")
    if tensor.is_meta:
        raise NotSupported.because(func, f"{name} is on the device meta and has no elements")
    if not tensor.is_contiguous():
        raise InvalidArgument.because(func, f"{name} is not contiguous")
    if tensor.is_conj() or tensor.is_neg():
        sentence = f"{name} is a lazy conjugate or negative; call resolve_conj and resolve_neg"
        raise InvalidArgument.because(func, sentence)


@dataclass(frozen=True)
class ReduceInfo:
    """How a finished reduction went.

    Attributes:
        local_world_size: Members whose input is in the result.
        tx_bytes: Bytes this peer sent.
        rx_bytes: Bytes this peer received.
        contributors: Ids of those members, in rank order.
        epoch: Number of the membership that completed it.
        attempts: 1, and one more for each run after a loss.
        bytes: Bytes of the elements that this peer passed; of a broadcast, that it received.
        seconds: From this peer's call to the decision, over all attempts, also while the program
            does not wait. It is the sum of the next two and of the time until the decision came:
            slower members, and the way to the master.
        waiting_seconds: The part until every member from which this peer receives had begun to send
            or, in shared memory, had made its call. Includes the way there, one round trip for
            large arrays.
        moving_seconds: The part until all of this peer's results were there: sending, receiving and
            reducing.
        total_weight: Sum of the contributors' weights, equal on all of them; None without weights.
    """

    local_world_size: int = 0
    tx_bytes: int = 0
    rx_bytes: int = 0
    contributors: tuple[str, ...] = ()
    epoch: int = 0
    attempts: int = 0
    bytes: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    moving_seconds: float = 0.0
    total_weight: float | None = None

    @property
    def world_size(self) -> int:
        """The same as `local_world_size`."""
        return self.local_world_size


@dataclass(frozen=True)
class RunStats:
    """The sums of a peer since it joined. Operations are collectives on arrays.

    An operation counts when it has ended. Times are of these operations, by the peer's own clock.
    Times of operations that run at once add up, so the sums may exceed the time that has passed.

    Attributes:
        epoch: Number of the present membership.
        rank: This peer's rank; -1 while it waits to be let in.
        world_size: Members.
        operations: Operations that were committed.
        aborted: Operations that ended otherwise.
        reruns: Attempts beside the first ones: after a loss, or with another plan.
        reduced_bytes: Bytes of the arrays of committed operations: elements that this peer passed,
            and in a broadcast received.
        sent_bytes: Payload that this peer has sent to other members, through links and shared
            memory, also in attempts that were lost. Syncs count only if they succeeded.
        received_bytes: The same, received.
        unencoded_bytes: What `sent_bytes` would be without `quantize`.
        seconds: From calls to decisions; the sum of the next three.
        waiting_seconds: Until every member from which this peer receives had begun to send or, in
            shared memory, had made its call. An attempt in shared memory that was lost is in here.
        moving_seconds: Until all of this peer's results were there: sending, receiving, reducing.
        deciding_seconds: Until the decision: slower members, and the way to the master.
        joined: Peers that were let in while this one was a member.
        lost: Members that were lost or have left.
        stripes: Connections of each link that is up, by the peer's id. Memory counts as one.
    """

    epoch: int
    rank: int
    world_size: int
    operations: int
    aborted: int
    reruns: int
    reduced_bytes: int
    sent_bytes: int
    received_bytes: int
    unencoded_bytes: int
    seconds: float
    waiting_seconds: float
    moving_seconds: float
    deciding_seconds: float
    joined: int
    lost: int
    stripes: Mapping[str, int]

    @property
    def compression(self) -> float:
        """How many times less was sent than without `quantize`; 1.0 before anything was."""
        return self.unencoded_bytes / self.sent_bytes if self.sent_bytes else 1.0


@dataclass(frozen=True)
class Departure:
    """A member that is gone.

    Attributes:
        peer: Its id.
        name: What messages called it.
        reason: Why, as the master has it.
    """

    peer: str
    name: str
    reason: str


@dataclass(frozen=True)
class MembershipChange:
    """Another membership than the program last saw.

    Attributes:
        epoch: Number of the membership.
        rank: This peer's rank in it.
        peers: The members' ids, in rank order.
        names: What messages call them, in rank order.
        joined: Those that were no members before, in rank order.
        lost: Members of before that are gone, in the order of their ranks then.
    """

    epoch: int
    rank: int
    peers: tuple[str, ...]
    names: tuple[str, ...]
    joined: tuple[str, ...]
    lost: tuple[Departure, ...]


@dataclass(frozen=True)
class Schedule:
    """How operations of some sizes run.

    Attributes:
        up_to: Bytes of the largest operation it is for; None: all that are larger than the others.
        kind: "ring", "direct", between hosts of several ranks "host_ring", "host_direct", and
            between groups of hosts "regional".
        shares: The part of the arrays that each rank combines, in rank order; they add up to 1.
    """

    up_to: int | None
    kind: str
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Topology:
    """The known facts about the network between members, and the plan made of them.

    Rates are bytes per second, times seconds; None: not known.

    Attributes:
        peers: Ids, in rank order.
        hosts: By rank: ranks with equal numbers share memory.
        up: By rank: what all its flows out carry together.
        down: The same of its flows in.
        rate: By (from, to): what the path between the two carries, where that is less than `up` and
            `down` allow.
        rtt: By (from, to): there and back.
        unreachable: Pairs (from, to) where every attempt to connect failed.
        relayed: Pairs, the lower rank first, that cannot connect: the master relays their bytes.
        ring: The order of the ring, in ranks.
        regions: By rank: those with equal numbers reduce among each other first. They are near
            each other, if that was measured. Empty where no schedule is "regional".
        schedules: By size, the smallest first.
    """

    peers: tuple[str, ...]
    hosts: tuple[int, ...]
    up: tuple[float | None, ...]
    down: tuple[float | None, ...]
    rate: Mapping[tuple[int, int], float]
    rtt: Mapping[tuple[int, int], float]
    unreachable: frozenset[tuple[int, int]]
    relayed: frozenset[tuple[int, int]]
    ring: tuple[int, ...]
    regions: tuple[int, ...]
    schedules: tuple[Schedule, ...]


class TensorInfo:
    """One entry of an explicit-API shared state: an array by its address in CPU memory.

    `from_numpy` and `from_torch` keep their array alive, and a tensor may be on any device. Each
    sync takes the memory that a tensor has at that time; its size and dtype must stay.

    Attributes:
        device_type: Where the memory is; None: on a device of torch that pccl has no name for.
    """

    def __init__(
        self,
        name: str,
        data_ptr: int,
        *,
        numel: int,
        dtype: DataType,
        device_type: DeviceType | None,
        allow_content_inequality: bool,
    ) -> None:
        if numel < 0:
            raise InvalidArgument.because("TensorInfo", f"{name!r} has {numel} elements")
        if not data_ptr and numel:
            raise InvalidArgument.because("TensorInfo", f"the address of {name!r} is null")
        self.name = name
        self.data_ptr = int(data_ptr or 0)
        self.numel = numel
        self.dtype = dtype
        self.device_type = device_type
        self.allow_content_inequality = allow_content_inequality
        self._kept: object = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._kept is not None:  # that of a deep copy is elsewhere
            self.data_ptr = _address_of(self._kept)

    def _check_sharable(self, func: str, *, receives: bool) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgument.because(func, f"an entry's name is text, not {self.name!r}")
        kept = self._kept
        if kept is None:
            if self.device_type is not DeviceType.CPU:
                sentence = f"{self.name}: an address must be one of CPU memory; use from_torch"
                raise NotSupported.because(func, sentence)
            return
        if not isinstance(kept, np.ndarray):
            _check_torch(func, self.name, kept)
            tensor: Any = kept
            if (tensor.numel(), str(tensor.dtype)) != (self.numel, f"torch.{self.dtype.label}"):
                sentence = f"the tensor of {self.name} was resized; make a new TensorInfo"
                raise InvalidUsage.because(func, sentence)
            # Those of the moment: `set_`, `data =` and `Module.to` change them.
            self.data_ptr = tensor.data_ptr()
            self.device_type = DeviceType.from_torch_device_type(tensor.device.type)
            return
        if kept.ctypes.data != self.data_ptr or kept.size != self.numel:
            sentence = f"the array of {self.name} was resized; make a new TensorInfo"
            raise InvalidUsage.because(func, sentence)
        if receives and not kept.flags.writeable:
            raise InvalidArgument.because(func, f"the array of {self.name} is read-only")

    @classmethod
    def from_numpy(
        cls, tensor: npt.NDArray[Any], name: str, *, allow_content_inequality: bool = False
    ) -> TensorInfo:
        """An entry for a C-contiguous NumPy array."""
        if not tensor.flags.c_contiguous:
            raise InvalidArgument.because("TensorInfo.from_numpy", f"{name} is not C-contiguous")
        dtype = DataType.from_numpy_dtype(tensor.dtype)
        memory = tensor.ctypes.data, tensor.size
        return cls._keeping(tensor, name, memory, dtype, allow_content_inequality)

    @classmethod
    def from_torch(
        cls, tensor: Any, name: str, *, allow_content_inequality: bool = False
    ) -> TensorInfo:
        """An entry for a contiguous tensor on any device."""
        _check_torch("TensorInfo.from_torch", name, tensor)
        dtype = DataType.from_torch_dtype(tensor.dtype)
        memory = tensor.data_ptr(), tensor.numel()
        info = cls._keeping(tensor, name, memory, dtype, allow_content_inequality)
        info.device_type = DeviceType.from_torch_device_type(tensor.device.type)
        return info

    @classmethod
    def _keeping(
        cls, kept: object, name: str, memory: tuple[int, int], dtype: DataType, loose: bool
    ) -> TensorInfo:
        info = cls(
            name,
            memory[0],
            numel=memory[1],
            dtype=dtype,
            device_type=DeviceType.CPU,
            allow_content_inequality=loose,
        )
        info._kept = kept
        return info


class SharedState:
    """The entries that `sync_shared_state` makes equal on all members, and their revision."""

    def __init__(self, tensor_infos: Sequence[TensorInfo]) -> None:
        if not tensor_infos:
            raise InvalidArgument.because("SharedState", "a shared state has at least one entry")
        self.tensor_infos = list(tensor_infos)
        self.revision = 0

    def push_revision(self) -> None:
        """Increments the revision."""
        self.revision += 1


@dataclass(frozen=True)
class SyncInfo:
    """What a `pccl.sync` did.

    Attributes:
        revision: Revision of the state that all members hold now. Where the library counts
            revisions, it is one more than after the previous sync.
        epoch: The membership in which it was decided.
        world_size: Number of members.
        peers: Their ids (32 hex digits), in rank order.
        tx_bytes: Bytes of state sent by this peer.
        rx_bytes: Bytes of state received by it.
        received: Names of this peer's entries that are new.
        diverged: Members whose state should have been the group's and was not: peer id -> names of
            the entries that differed (the first few). Equal on all members.
    """

    revision: int
    epoch: int
    world_size: int
    peers: tuple[str, ...]
    tx_bytes: int
    rx_bytes: int
    received: tuple[str, ...]
    diverged: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class SharedStateSyncInfo:
    """Bytes of shared state that a synchronisation sent and received."""

    tx_bytes: int = 0
    rx_bytes: int = 0
