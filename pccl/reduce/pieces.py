"""Arrays on accelerators: through pinned memory, in pieces, while the network works on others.

Piece k + 1 comes from its device and piece k - 1 goes back to it while piece k is reduced. Each piece
is an operation of its own, so a member may be lost between two of them: then all pieces run again, and
the caller's arrays are not written before all were reduced over the same members. A tree that fits in
one piece is one operation like any other, and meets members that have theirs in CPU memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pccl import _arrays, _settings
from pccl import quantize as quantization
from pccl import tree as trees
from pccl._arrays import Buffer, Leaf, Prepared, Staging
from pccl.errors import InvalidArgument
from pccl.reduce import weighted
from pccl.reduce.weighted import WeightedMean
from pccl.types import DataType, ReduceInfo, ReduceOp

if TYPE_CHECKING:
    from pccl.communicator import Communicator

__all__ = ["Device", "Host", "Part", "Staged", "allreduce", "cut", "reduce_pieces"]

# Large enough that a piece's round trips do not show; small enough that the copies of the first and the
# last one, which nothing overlaps, do not either. Equal on all members.
PIECE_BYTES = 32 << 20
_SLOTS = 3  # coming, being reduced, going
_ALIGNMENT = 64  # of cuts inside an array: no element is split

Bytes = npt.NDArray[np.uint8]
Wait = Callable[[], None]


class Device(Protocol):
    """What the pipeline needs of an accelerator. Its copies run in the order in which they were begun."""

    def pinned(self, size: int) -> Bytes:
        """Host memory that the device copies to and from by itself."""

    def empty(self, flat: Any) -> Any:
        """Memory on the device for the results of `flat`."""

    def fetch(self, flat: Any, begin: int, host: Bytes) -> Wait:
        """Begins to copy bytes `begin...` of `flat` to `host`; what it returns waits for the end."""

    def store(self, flat: Any, begin: int, host: Bytes) -> Wait:
        """Begins to copy `host` to the bytes `begin...` of `flat`."""


class Staged(NamedTuple):
    """An array on a device.

    Attributes:
        device: Where it is.
        dtype: What its elements are.
        shape: Its shape.
        flat: Its bytes on the device in logical order, flat: its own memory or a copy.
        restore: Makes an array of its kind from such bytes, which belong to it from now on.
        write: Writes such bytes to the array itself.
    """

    device: Device
    dtype: DataType
    shape: tuple[int, ...]
    flat: Any
    restore: Callable[[Any], object]
    write: Callable[[Any], None]


class Host:
    """CPU memory as a device: for the arrays in it that share a tree with others."""

    def pinned(self, size: int) -> Bytes:
        return np.empty(size, np.uint8)

    def empty(self, flat: Bytes) -> Bytes:
        return np.empty_like(flat)

    def fetch(self, flat: Bytes, begin: int, host: Bytes) -> Wait:
        host[:] = flat[begin : begin + host.size]
        return _done

    def store(self, flat: Bytes, begin: int, host: Bytes) -> Wait:
        flat[begin : begin + host.size] = host
        return _done


def _done() -> None:
    pass


class Part(NamedTuple):
    """Bytes [begin, end) of one array."""

    array: int
    begin: int
    end: int


def cut(sizes: Sequence[int], piece_bytes: int) -> list[list[Part]]:
    """Pieces of at most `piece_bytes` bytes, a multiple of 64, that together are arrays of these sizes, in order.

    Small arrays share a piece; a large one is cut at multiples of 64 bytes.
    """
    pieces: list[list[Part]] = [[]]
    room = piece_bytes
    for array, size in enumerate(sizes):
        begin = 0
        while True:
            left = size - begin
            taken = left if left <= room else room - room % _ALIGNMENT
            if taken or not left:
                pieces[-1].append(Part(array, begin, begin + taken))
            begin += taken
            room -= taken
            if begin == size:
                break
            pieces.append([])
            room = piece_bytes
    return pieces


Reduce = Callable[[int, Sequence[Part], Sequence[Bytes]], ReduceInfo]


def reduce_pieces(
    devices: Sequence[Device],
    flats: Sequence[Any],
    results: Sequence[Any],
    pieces: Sequence[Sequence[Part]],
    reduce: Reduce,
) -> list[ReduceInfo]:
    """One pass over all pieces. All copies are over when it returns or raises.

    Args:
        devices: Of each array.
        flats: The inputs' bytes on their devices, not written.
        results: Where the results' bytes go, apart from the inputs.
        pieces: From `cut`.
        reduce: Called with (number of the piece, its parts, their bytes in host memory), in order;
            replaces the bytes by the result, and returns how it went.

    Returns:
        What `reduce` returned for each piece.
    """
    size = max(sum(part.end - part.begin for part in piece) for piece in pieces)
    count = min(_SLOTS, len(pieces))
    slots = {device: [device.pinned(size) for _ in range(count)] for device in set(devices)}
    coming: list[Wait] = []  # copies of the piece after the one in hand
    going: deque[list[Wait]] = deque()  # copies of those before it
    infos = []

    def fetch(number: int) -> list[Bytes]:
        hosts, at = [], 0
        for array, begin, end in pieces[number]:
            host = slots[devices[array]][number % _SLOTS][at : at + end - begin]
            coming.append(devices[array].fetch(flats[array], begin, host))
            hosts.append(host)
            at += end - begin
        return hosts

    def store(number: int, hosts: Sequence[Bytes]) -> None:
        going.append([])
        for (array, begin, _), host in zip(pieces[number], hosts, strict=True):
            going[-1].append(devices[array].store(results[array], begin, host))

    try:
        following = fetch(0)
        for number, piece in enumerate(pieces):
            hosts = following
            _wait(coming)
            coming.clear()
            if number + 1 < len(pieces):
                if len(going) == _SLOTS - 1:  # it had the slot of the piece that comes next
                    _wait(going.popleft())
                following = fetch(number + 1)
            infos.append(reduce(number, piece, hosts))
            store(number, hosts)
    finally:
        for begun in (coming, *going):
            _wait(begun)
    return infos


def _wait(begun: Sequence[Wait]) -> None:
    for wait in begun:
        wait()


class _Piece(NamedTuple):
    """A `pccl._arrays.Prepared`, in place."""

    arrays: list[tuple[Bytes, Bytes, int]]


def allreduce(
    comm: Communicator,
    func: str,
    tree: Any,
    out: Any,
    op: ReduceOp | str,
    weight: object,
    quantize: object,
    tag: int | None,
    timeout: float | None,
) -> tuple[Any, ReduceInfo] | None:
    """`pccl.allreduce` of a tree that has arrays on a device; None, and nothing was done, if it has none."""
    flat = trees.flatten_operands(tree, func)
    if not any(map(_arrays.on_device, flat.leaves)):
        return None
    comm._joined(func)
    how = ReduceOp.parse(op, func)
    number = None if tag is None else _settings.tag(tag, func)
    coding = None if quantize is None else quantization.parse(quantize, func)
    if coding is not None:
        quantization.check_op(coding, how, func)
    if weight is not None:
        weighted.check_op(how, func)
        weight = weighted.as_number(weight, func)  # once: it may be on a device, too
    kind = "" if weight is None else weighted.WORDS
    travels = "" if coding is None else quantization.words(coding)
    deadline = _settings.Deadline(timeout)
    inputs = [
        _stage(leaf, func, f"tree{path}", op=how)
        for path, leaf in zip(flat.paths, flat.leaves, strict=True)
    ]
    outputs = None if out is None else _outputs(func, flat.paths, inputs, out)
    buffers = [[_outline(staged) for staged in parts] for parts, _ in inputs]
    structure = (kind + travels).encode() + trees.structure(flat.paths, buffers, flat.nones)
    description = kind + trees.describe(flat.paths, buffers, flat.nones) + travels
    staged = [part for parts, _ in inputs for part in parts]
    pieces = cut([_size(part) for part in staged], PIECE_BYTES)
    names = [
        (f"{path} {shard}", trees.describe_buffer(buffer))
        for path, outlines in zip(flat.paths, buffers, strict=True)
        for shard, buffer in enumerate(outlines)
    ]

    def feedback(part: Part) -> tuple[str, str]:
        return _name(part, _size(staged[part.array]), *names[part.array])

    def reduce(at: int, parts: Sequence[Part], hosts: Sequence[Bytes]) -> ReduceInfo:
        which = f"piece {at + 1} of {len(pieces)}: " if len(pieces) > 1 else ""
        elements = [
            _elements(host, staged[part.array].dtype)
            for part, host in zip(parts, hosts, strict=True)
        ]
        mean = None if weight is None else WeightedMean(elements, weight, how, func)
        prepared: Prepared
        if mean is None:
            codes = [int(part.dtype) for part in elements]
            prepared = _Piece(list(zip(hosts, hosts, codes, strict=True)))
        else:
            prepared = sums = Staging(mean.sends)
        operation = comm._start(
            func,
            prepared,
            op=how if mean is None else ReduceOp.SUM,
            tag=number,
            level=2,
            rerun=True,
            structure=which.encode() + structure,
            description=which + description,
            timeout=deadline.left(),
            quantize=coding,
            names=list(map(feedback, parts)),
            wait=True,
        )
        info = operation.wait(None)
        if mean is not None:
            mean.finish(sums.results, [part.array for part in elements])
        return ReduceInfo(
            local_world_size=info.world_size,
            tx_bytes=info.tx_bytes,
            rx_bytes=info.rx_bytes,
            contributors=tuple(info.contributors),
            epoch=info.epoch,
            attempts=info.attempts,
        )

    devices = [part.device for part in staged]
    results = [part.device.empty(part.flat) for part in staged]
    infos: list[ReduceInfo] = []
    # A piece's feedback changes with its own commit; it counts only if that of all others does.
    several = len(pieces) > 1 and coding is not None and coding.error_feedback
    noted = [feedback(part)[0] for piece in pieces for part in piece] if several else []
    while True:
        before = comm._feedback(number, noted)
        try:
            infos += reduce_pieces(devices, [part.flat for part in staged], results, pieces, reduce)
        except BaseException:
            comm._take_back(number, noted, before)
            raise
        # Who contributed to an operation is the same for all of them, so all come to the same decision.
        if len({info.contributors for info in infos[-len(pieces) :]}) == 1:
            break
        comm._take_back(number, noted, before)
    made = iter(results)
    if outputs is None:
        result = flat.unflatten([restore([next(made) for _ in parts]) for parts, restore in inputs])
    else:
        result = out
        for target in outputs:
            target.write(next(made))
    return result, _total(infos)


def _elements(host: Bytes, dtype: DataType) -> Buffer:
    """Bytes as elements of the right size."""
    return Buffer(host.view(f"u{dtype.size}"), dtype)


def _name(part: Part, size: int, name: str, outline: str) -> tuple[str, str]:
    """Under which error feedback is kept: that of a whole array as for one in CPU memory."""
    if (part.begin, part.end) == (0, size):
        return name, outline
    return f"{name} from {part.begin}", f"{outline} to {part.end}"


def _total(infos: Sequence[ReduceInfo]) -> ReduceInfo:
    return ReduceInfo(
        local_world_size=infos[-1].local_world_size,
        tx_bytes=sum(info.tx_bytes for info in infos),
        rx_bytes=sum(info.rx_bytes for info in infos),
        contributors=infos[-1].contributors,
        epoch=infos[-1].epoch,
        attempts=max(info.attempts for info in infos),
    )


_Restore = Callable[[Sequence[Any]], object]


def _stage(leaf: object, func: str, where: str, *, op: ReduceOp) -> tuple[list[Staged], _Restore]:
    """An input on its device or in CPU memory, and what makes a result of its kind."""
    staged = _arrays.stage(leaf, func, where)
    if staged is not None:
        return [staged], lambda results: staged.restore(results[0])
    found: Leaf = _arrays.read(leaf, func, where, op=op)
    parts = [_on_host(buffer) for buffer in found.buffers]

    def restore(results: Sequence[Any]) -> object:
        arrays = [part.restore(flat) for part, flat in zip(parts, results, strict=True)]
        return found.restore(arrays)  # type: ignore[arg-type]  # NumPy arrays

    return parts, restore


_HOST = Host()


def _on_host(buffer: Buffer) -> Staged:
    array, dtype = buffer

    def restore(flat: Bytes) -> object:
        return flat.view(array.dtype).reshape(array.shape)

    def write(flat: Bytes) -> None:
        array[...] = restore(flat)

    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return Staged(_HOST, dtype, array.shape, flat, restore, write)


def _outputs(
    func: str, paths: Sequence[str], inputs: Sequence[tuple[list[Staged], _Restore]], out: Any
) -> list[Staged]:
    """Where to write to, checked to match the inputs leaf by leaf."""
    flat = trees.flatten(out, func, "out")
    if flat.paths != list(paths):
        raise InvalidArgument.because(func, "out has another structure than tree")
    outputs = []
    for path, (parts, _), target in zip(paths, inputs, flat.leaves, strict=True):
        staged = _arrays.stage(target, func, f"out{path}")
        if staged is not None:
            targets = [staged]
        else:
            targets = [_on_host(buffer) for buffer in _arrays.write(target, func, f"out{path}")]
        have = [(part.dtype, part.shape) for part in targets]
        want = [(part.dtype, part.shape) for part in parts]
        if have != want or [t.device for t in targets] != [p.device for p in parts]:
            sentence = f"out{path} differs from tree{path} in dtype, shape or device"
            raise InvalidArgument.because(func, sentence)
        outputs += targets
    return outputs


def _size(staged: Staged) -> int:
    return int(np.prod(staged.shape, dtype=np.int64)) * staged.dtype.size


def _outline(staged: Staged) -> Buffer:
    """Dtype and shape as the signature of an operation has them, without elements."""
    return Buffer(np.broadcast_to(np.zeros((), np.uint8), staged.shape), staged.dtype)
