"""A collective call as its user made it, checked, and how it is started.

All collectives of both APIs are a `Request` first. It is built in one place, `make`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypedDict

from pccl import _settings, frameworks
from pccl import quantize as quantization
from pccl import tree as trees
from pccl.errors import InvalidArgument, NotSupported
from pccl.quantize import Quantize
from pccl.reduce import weighted
from pccl.reduce.residuals import Taken, Use
from pccl.tree import Entry, Tree
from pccl.types import ReduceOp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pccl import _core
    from pccl.peer import Peer


class Unchecked(TypedDict, total=False):
    """The fields of a `Request` that are taken as they are."""

    out: Any
    root: int
    level: int
    return_info: bool
    by_default: bool


class Collective(TypedDict, total=False):
    """The engine's options of an operation that is no plain all-reduce."""

    op: int
    rerun: bool
    kind: int
    root: int
    parts: int


class Signature(NamedTuple):
    """The facts that all members must agree on, to be compared and in words.

    Attributes:
        structure: Compared by its hash.
        description: For error sentences.
    """

    structure: bytes
    description: str


@dataclass(frozen=True, eq=False)
class Request:
    """One collective call. All but the arrays is checked.

    Attributes:
        func: The user's call, for errors.
        comm: The communicator, which has joined.
        tree: The input: a tree in the simple API, an array in the explicit API.
        op: How elements are combined.
        deadline: Of the whole call.
        out: Where the result goes; None for new arrays.
        weight: This member's, for a weighted mean: a number of any kind, or a tracer of one.
        quantize: How elements travel; None: exactly.
        root: Rank of the member whose elements are sent, as the user gave it.
        tag: None: calls meet by order.
        level: 1 or 2.
        return_info: The user wants the `ReduceInfo`, too.
        by_default: The user named no communicator.
    """

    func: str
    comm: Peer
    tree: Any
    op: ReduceOp
    deadline: _settings.Deadline
    out: Any = None
    weight: Any = None
    quantize: Quantize | None = None
    root: int = 0
    tag: int | None = None
    level: int = 2
    return_info: bool = False
    by_default: bool = False

    @cached_property
    def flat(self) -> Tree:
        """The flattened tree.

        Raises:
            InvalidArgument: It has no leaf, or cannot be flattened.
        """
        return trees.flatten_operands(self.tree, self.func)

    @property
    def leaves(self) -> list[tuple[str, Any]]:
        """The tree's leaves, each with its name in errors."""
        flat = self.flat
        return [(f"tree{path}", leaf) for path, leaf in zip(flat.paths, flat.leaves, strict=True)]

    @cached_property
    def targets(self) -> list[tuple[str, Any]]:
        """The leaves of `out`, in the order of the tree's, each with its name in errors.

        Raises:
            InvalidArgument: It has another structure than the tree.
        """
        flat = trees.flatten(self.out, self.func, "out")
        paths = self.flat.paths
        if flat.paths != paths:
            only = sorted(set(paths).symmetric_difference(flat.paths))[:3]
            named = ", ".join(f"only {'tree' if path in paths else 'out'}{path}" for path in only)
            self.refuse(f"out has another structure than tree: {named}")
        return [(f"out{path}", leaf) for path, leaf in zip(paths, flat.leaves, strict=True)]

    @property
    def joined(self) -> _core.Communicator:
        """The engine."""
        return self.comm._joined(self.func)

    def touches_a_device(self) -> bool:
        """Whether an array of the tree or of `out` is on an accelerator."""
        if not frameworks.devices_in_use():
            return False
        arrays = [*self.leaves, *(self.targets if self.out is not None else ())]
        return any(frameworks.device_adapter(leaf) is not None for _, leaf in arrays)

    def refuse(self, sentence: str) -> NoReturn:
        """Raises InvalidArgument of the user's call."""
        raise InvalidArgument.because(self.func, sentence)

    def check_target(self, where: str, have: Sequence[Entry], want: Sequence[Entry]) -> None:
        """Refuses arrays of `out` that are not what the result needs."""
        if have != want:
            self.refuse(f"{where} is {trees.describe(have)}, but must be {trees.describe(want)}")

    def sign(self, entries: Sequence[Entry], compared: Sequence[Entry] | None = None) -> Signature:
        """The call's signature.

        Args:
            entries: Its arrays, which errors name.
            compared: What is compared of them. Default: all of it.
        """
        nones = self.flat.nones if self.level == 2 else ()
        kind = "" if self.weight is None else weighted.WORDS
        travels = "" if self.quantize is None else quantization.words(self.quantize)
        structure = trees.structure(entries if compared is None else compared, nones)
        description = kind + trees.describe(entries, nones) + travels
        return Signature((kind + travels).encode() + structure, description)

    def start(
        self,
        arrays: Sequence[tuple[Any, Any, int]],
        signature: Signature,
        *,
        names: Sequence[tuple[str, str]] = (),
        weight: float = 1.0,
        wait: bool = True,
        kept: object = None,
        **collective: Unpack[Collective],
    ) -> _core.Operation:
        """Starts the operation, which keeps its arrays and `kept` until it is finished.

        Args:
            arrays: (send, recv, dtype code) each.
            signature: From `sign`.
            names: (path, outline) of the arrays, for error feedback.
            weight: By which the arrays were multiplied, for error feedback.
            wait: Return, or raise, when it is finished. Calls that block pass it: Ctrl-C between
                the start and a wait of its own would leave the other members in the operation.
            kept: Lives as long as the operation.
        """
        coding: dict[str, Any] = {}
        engine, feedback = self.joined, self.comm._residuals
        taken = Taken()
        if self.quantize is not None:
            coding["quantize"] = quantization.codes(self.quantize)
            if self.quantize.error_feedback:
                members = engine.membership()[2] if self.op is ReduceOp.AVG else 0
                taken = feedback.take(arrays, Use(self.tag, weight, members), names)
                coding["residuals"] = [None if one is None else one.values for one in taken]
                coding["residual_members"] = members
        how: dict[str, Any] = {"op": int(self.op), "rerun": self.level == 2, **collective}
        try:
            operation = engine.start(
                arrays,
                tag=self.tag,
                level=self.level,
                structure=signature.structure,
                description=signature.description,
                timeout=self.deadline.left(),
                wait=wait,
                kept=kept,
                **how,
                **coding,
            )
        except BaseException:
            feedback.give_back(taken)
            raise
        if taken:
            feedback.follow(operation, taken)
        return operation


def make(
    func: str,
    comm: Peer,
    tree: Any,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    weight: object = None,
    quantize: object = None,
    tag: int | None = None,
    timeout: float | None = None,
    **unchecked: Unpack[Unchecked],
) -> Request:
    """The request for a user's call.

    Raises:
        InvalidUsage: The communicator is not connected, or closed.
        InvalidArgument: An argument makes no sense, or two of them do not go together.
        NotSupported: JAX traces the caller's function.
    """
    comm._joined(func)
    explicit = unchecked.get("level") == 1
    if func != "allreduce" and not explicit and frameworks.in_program():
        sentence = "inside jit only pccl.allreduce works; call this outside of the traced function"
        raise NotSupported.because(func, sentence)
    how = ReduceOp.parse(op, func)
    coding = None if quantize is None else quantization.parse(quantize, func)
    if coding is not None:
        quantization.check_op(coding, how, func)
    if weight is not None:
        weighted.check_op(how, func)
        if frameworks.find_tracing([weight]) is None:
            weighted.as_number(weight, func)  # errors show the weight as it was given
    if tag is not None or explicit:
        tag = _settings.tag(tag, func)
    deadline = _settings.Deadline(_settings.seconds(timeout, func))
    return Request(
        func, comm, tree, how, deadline, weight=weight, quantize=coding, tag=tag, **unchecked
    )
