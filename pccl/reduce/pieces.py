"""The route of arrays on accelerators: through pinned memory, in pieces.

Piece k + 1 comes from its device and piece k - 1 goes back to it while piece k is reduced. Each
piece is an operation of its own, so a member may be lost between two of them. Then all pieces run
again; the caller's arrays are not written before all pieces were reduced over the same members. A
tree that fits in one piece is one operation like any other, and meets members that have theirs in
CPU memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl import _arrays, frameworks
from pccl import tree as trees
from pccl.errors import located
from pccl.frameworks import Buffer, Bytes, Device, Staged, Wait
from pccl.reduce.general import feedback_names
from pccl.reduce.request import Request, Signature
from pccl.reduce.staging import Staging
from pccl.reduce.weighted import WeightedMean, as_number
from pccl.reduce.work import reduce_info, total
from pccl.types import ReduceInfo, ReduceOp, check_op

# Equal on all members. Large enough to hide the round trips of a piece, small enough to hide the
# copies of the first and the last piece, which nothing overlaps.
PIECE_BYTES = 32 << 20
_SLOTS = 3  # coming, being reduced, going
_ALIGNMENT = 64  # of cuts inside an array: no element is split


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
    """Cuts arrays of these sizes, in order, into pieces of at most `piece_bytes`, a multiple of 64.

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


class _Input(NamedTuple):
    """A leaf of the tree: its arrays, what makes a result of its kind, and how many of the last
    arrays are guards (`_arrays.Leaf`)."""

    parts: list[Staged]
    restore: Callable[[Sequence[Any]], object]
    guards: int = 0

    @property
    def outlines(self) -> list[Buffer]:
        """Dtypes and shapes as an operation's signature has them, without elements."""
        nothing = np.zeros((), np.uint8)
        return [Buffer(np.broadcast_to(nothing, part.shape), part.dtype) for part in self.parts]


class _Pipeline:
    """One request in pieces."""

    def __init__(self, request: Request) -> None:
        flat = request.flat
        self._request = request
        self._inputs = [_stage(leaf, request, where) for where, leaf in request.leaves]
        weight = request.weight  # read once: it may be on a device, too
        self._weight = None if weight is None else as_number(weight, request.func)
        self._outputs = None if request.out is None else self._find_outputs()
        buffers = [found.outlines for found in self._inputs]
        self._signature = request.sign(trees.entries_of(flat.paths, buffers, flat.leaves))
        self._names = feedback_names(flat.paths, buffers)
        self._staged = [part for found in self._inputs for part in found.parts]
        self._pieces = cut([part.size for part in self._staged], PIECE_BYTES)

    def _find_outputs(self) -> list[list[Staged]]:
        """Where to write each leaf, checked to match the inputs leaf by leaf."""
        request = self._request
        outputs = []
        for given, (where, leaf) in zip(self._inputs, request.targets, strict=True):
            staged = _staged(leaf, request, where)
            if staged is not None:
                with located(request.func, where):
                    _arrays.check_device_target(leaf)
                targets = [staged]
            else:
                memory = _arrays.write(leaf, request.func, where).buffers
                targets = list(map(_on_host, memory))
            have, want = (
                [(part.dtype, part.shape, part.device) for part in parts]
                for parts in (targets, given.parts[: len(given.parts) - given.guards])
            )
            if have != want:
                request.refuse(f"{where} differs from its input in dtype, shape or device")
            outputs.append(targets)
        return outputs

    def _feedback(self, part: Part) -> tuple[str, str]:
        """The name of a part's error feedback: of a whole array, as if it were in CPU memory."""
        name, outline = self._names[part.array]
        if (part.begin, part.end) == (0, self._staged[part.array].size):
            return name, outline
        return f"{name} from {part.begin}", f"{outline} to {part.end}"

    def _reduce(self, at: int, parts: Sequence[Part], hosts: Sequence[Bytes]) -> ReduceInfo:
        """Reduces one piece, in place in host memory."""
        request = self._request
        which = f"piece {at + 1} of {len(self._pieces)}: " if len(self._pieces) > 1 else ""
        elements = []
        for part, host in zip(parts, hosts, strict=True):
            dtype = self._staged[part.array].dtype
            elements.append(Buffer(host.view(f"V{dtype.size}"), dtype))
        weight = self._weight
        mean = None if weight is None else WeightedMean(elements, weight, request.func)
        if mean is None:
            codes = [int(dtype) for _, dtype in elements]
            arrays = list(zip(hosts, hosts, codes, strict=True))
        else:
            staging = Staging(mean.sends)
            arrays = staging.arrays
        structure, description = self._signature
        operation = request.start(
            arrays,
            Signature(which.encode() + structure, which + description),
            names=list(map(self._feedback, parts)),
            weight=1.0 if mean is None else mean.number,
            op=int(request.op if mean is None else ReduceOp.SUM),
        )
        info = operation.wait(None)
        if mean is not None:
            mean.finish(staging.results, [array for array, _ in elements])
        return reduce_info(info, mean)

    def run(self) -> tuple[Any, ReduceInfo]:
        """Reduces all pieces over the same members: the result, and how it went."""
        request, pieces, staged = self._request, self._pieces, self._staged
        devices = [part.device for part in staged]
        flats = [part.flat for part in staged]
        results = [part.device.empty(part.flat) for part in staged]
        infos: list[ReduceInfo] = []
        # A piece's feedback changes with its own commit; it counts only if all pieces do.
        coding, residuals = request.quantize, request.comm._residuals
        several = len(pieces) > 1 and coding is not None and coding.error_feedback
        noted = [self._feedback(part)[0] for piece in pieces for part in piece] if several else []
        while True:
            before = residuals.copies(request.tag, noted)
            try:
                infos += reduce_pieces(devices, flats, results, pieces, self._reduce)
            except BaseException:
                residuals.restore(request.tag, noted, before)
                raise
            # The contributors of an operation are equal on all members, so all decide alike here.
            if len({info.contributors for info in infos[-len(pieces) :]}) == 1:
                break
            residuals.restore(request.tag, noted, before)
        following = iter(results)
        made = [[next(following) for _ in found.parts] for found in self._inputs]
        if self._outputs is None:
            leaves = [found.restore(parts) for found, parts in zip(self._inputs, made, strict=True)]
            result = request.flat.unflatten(leaves)
        else:
            result = request.out
            for found, parts in zip(self._inputs, made, strict=True):
                if found.guards:
                    found.restore(parts)  # raises what is wrong with it, before anything is written
            for targets, parts in zip(self._outputs, made, strict=True):
                for target, part in zip(targets, parts, strict=False):  # guards have no target
                    target.write(part)
        return result, total(infos, max(info.attempts for info in infos))


def allreduce(request: Request) -> tuple[Any, ReduceInfo]:
    """Reduces a tree that has arrays on a device."""
    return _Pipeline(request).run()


def _staged(leaf: object, request: Request, where: str) -> Staged | None:
    """An array on its device; None for what is in CPU memory."""
    adapter = frameworks.device_adapter(leaf)
    if adapter is None:
        return None
    with located(request.func, where):
        staged = adapter.stage(leaf)
        check_op(staged.dtype, request.op, "")
    return staged


def _stage(leaf: object, request: Request, where: str) -> _Input:
    """An input on its device or in CPU memory."""
    staged = _staged(leaf, request, where)
    if staged is not None:
        return _Input([staged], lambda results: staged.restore(results[0]))
    found = _arrays.read(leaf, request.func, where, op=request.op)
    parts = list(map(_on_host, found.buffers))

    def restore(results: Sequence[Any]) -> object:
        arrays: list[Any] = [p.restore(flat) for p, flat in zip(parts, results, strict=True)]
        return found.restore(arrays)

    return _Input(parts, restore, found.guards)


_HOST = Host()


def _on_host(buffer: Buffer) -> Staged:
    array, dtype = buffer

    def restore(flat: Bytes) -> object:
        return flat.view(array.dtype).reshape(array.shape)

    def write(flat: Bytes) -> None:
        array[...] = restore(flat)

    return Staged(_HOST, dtype, array.shape, _arrays.flat_bytes(array), restore, write)
