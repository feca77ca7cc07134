"""A user's state <-> the named entries that the engine makes equal on all members.

A state is a tree: arrays, numbers, strings and None in nested containers. An object with
`state_dict` and `load_state_dict` stands for its state dict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pccl import _arrays, frameworks
from pccl import tree as trees
from pccl.errors import InvalidArgument, NotSupported, located
from pccl.frameworks import Array, Node, Place, Shared

_MAX_HINT = 2000  # bytes; entries deeper than that cannot be built where they are missing
PYTHON = "Python "  # begins the kinds of values

_PART = ", "  # in kinds: which part of a spread array it is, and its dtype
_KINDS = {"None", "bool", "int", "float", "str"}  # of values

Entry = tuple[str, str, tuple[int, ...], str, bool, Array, bool, Place | None]
Offered = tuple[str, str, Sequence[int], str, int]
Replaced = tuple[str, str, Sequence[int], str, Array]


class _Step(NamedTuple):
    """One step of the way to an entry: which kind of container, and where in it."""

    kind: str  # d, i: dict with string or int keys; l: list; t: tuple; o: object; a: any other
    key: str | int


class _Misfit(Exception):
    """Why this member cannot take over an entry of the others."""


class _Leaf:
    """One array or value."""

    def __init__(self, node: object, *, touched: bool = False) -> None:
        self.node = node
        self.touched = touched
        self._value = node

    def replace(self, kind: str, shape: tuple[int, ...], data: Array) -> None:
        self._value = _adopt("", kind, shape, data, self.node)
        self.touched = True

    def result(self) -> object:
        return self._value


class _Branch:
    """A container, or an object that has a state dict."""

    def __init__(self, node: object, rebuild: Callable[[Sequence[object]], object] | None) -> None:
        self.node = node
        self.children: dict[str | int, _Leaf | _Branch] = {}
        self.added: dict[str | int, _Leaf | _Branch] = {}  # came with the group's state
        self._rebuild = rebuild  # None: an object, with its state dict as the only child

    def takes(self, step: _Step) -> bool:
        """Whether it is such a container as `step` goes into."""
        if step.kind in ("d", "i"):
            keys = [*self.children, *self.added]
            kind = int if step.kind == "i" else str
            return isinstance(self.node, dict) and all(isinstance(key, kind) for key in keys)
        plain = isinstance(self.node, dict | list | tuple) and not hasattr(self.node, "_fields")
        if step.kind == "a":
            return not plain
        return plain and isinstance(self.node, list if step.kind == "l" else tuple)

    @property
    def is_object(self) -> bool:
        return self._rebuild is None

    @property
    def touched(self) -> bool:
        return bool(self.added) or any(child.touched for child in self.children.values())

    def result(self) -> object:
        if not self.touched:
            return self.node
        results = [child.result() for child in self.children.values()]
        if self._rebuild is None:
            self.node.load_state_dict(results[0])  # type: ignore[attr-defined]
            return self.node
        same = all(new is c.node for new, c in zip(results, self.children.values(), strict=True))
        if same and not self.added:
            return self.node
        made = self._rebuild(results)
        added = {key: child.result() for key, child in sorted(self.added.items(), key=_order)}
        if isinstance(made, dict):
            for key, value in added.items():
                made[key] = value
        elif isinstance(made, list):
            made.extend(added.values())
        elif added and isinstance(made, tuple):
            made = trees.tuple_like(made, (*made, *added.values()))
        return made


def _is_value(entry: Entry) -> bool:
    return entry[1].startswith(PYTHON)


def _order(item: tuple[str | int, object]) -> tuple[bool, str | int]:
    return (isinstance(item[0], str), item[0])


class State:
    """A flattened state.

    Attributes:
        entries: For the engine: (name, kind, shape, hint, loose, bytes, writable, place).
    """

    def __init__(self, state: object, func: str) -> None:
        self.entries: list[Entry] = []
        self._func = func
        self._leaves: dict[str, _Leaf] = {}
        self._grown: list[_Branch] = []
        try:
            self._root = self._walk(state, "", ())
        except RecursionError:
            sentence = "state is nested too deeply, or contains itself"
            raise InvalidArgument.because(func, sentence) from None

    def check(self, offered: Sequence[Offered]) -> str | None:
        """Whether `finish` could take these entries: None, or a sentence.

        Args:
            offered: (name, kind, shape, hint, bytes).
        """
        own = {entry[0]: entry for entry in self.entries}
        name = ""
        try:
            for name, kind, shape, hint, size in offered:
                mine = own.get(name)
                if mine is None:
                    origin, way = _read_hint(name, hint)
                    _check_kind(origin, kind, shape, size)
                    self._attach(way, _Leaf(None))
                elif mine[1] != kind and not (kind.startswith(PYTHON) and _is_value(mine)):
                    raise _Misfit(f"it is {kind} there, and {mine[1]} here")
                elif not kind.startswith(PYTHON) and mine[5].size != size:
                    raise _Misfit(f"it has {size} bytes there, and {mine[5].size} here")
            for branch in self._grown:
                first = len(branch.children)
                wanted = set(range(first, first + len(branch.added)))
                if not isinstance(branch.node, dict) and set(branch.added) != wanted:
                    raise _Misfit("something before it in the list has no entries")
        except _Misfit as misfit:
            where = f"state{name}" if name else "the state"
            return f"{where} of the run cannot be had here: {misfit}"
        finally:
            for branch in self._grown:
                branch.added.clear()
            self._grown.clear()
        return None

    def finish(self, written: Sequence[str], replaced: Sequence[Replaced]) -> Any:
        """The state with what a sync has changed.

        Args:
            written: Names of entries with new bytes in their own memory.
            replaced: What else is new: (name, kind, shape, hint, bytes).
        """
        for name in written:
            self._leaves[name].touched = True
            frameworks.count_write(self._leaves[name].node)
        for name, kind, shape, hint, data in replaced:
            leaf = self._leaves.get(name)
            if leaf is not None:
                leaf.replace(kind, tuple(shape), data)
            else:
                origin, way = _read_hint(name, hint)
                value = _adopt(origin, kind, tuple(shape), data, None)
                self._attach(way, _Leaf(value, touched=True))
        return self._root.result()

    @contextlib.contextmanager
    def counting_writes(self, overwrote: Callable[[], bool]) -> Iterator[None]:
        """In a sync: if it fails and `overwrote` a part, writable leaves may have new bytes."""
        try:
            yield
        except BaseException:
            for name, *_, writable, _ in self.entries if overwrote() else ():
                if writable:
                    frameworks.count_write(self._leaves[name].node)
            raise

    def _walk(self, node: object, path: str, way: tuple[_Step, ...]) -> _Leaf | _Branch:
        if _has_state_dict(node):
            branch = _Branch(node, None)
            inner = node.state_dict()  # type: ignore[attr-defined]
            branch.children[""] = self._walk(inner, path, (*way, _Step("o", "")))
            return branch
        parts = None if node is None else trees.parts(node, path, self._func, "state")
        if parts is None:
            leaf = _Leaf(node)
            self._enter(path, leaf, way)
            return leaf
        branch = _Branch(node, parts.rebuild)
        steps = _steps(node, parts)
        for step, text, child in zip(steps, parts.keys, parts.children, strict=True):
            branch.children[step.key] = self._walk(child, path + text, (*way, step))
        return branch

    def _enter(self, path: str, leaf: _Leaf, way: tuple[_Step, ...]) -> None:
        with located(self._func, f"state{path}"):
            shared = _share(leaf.node)
            _arrays.check_written(shared)
        hint = json.dumps([shared.origin, *way], separators=(",", ":"))
        if len(hint.encode()) > _MAX_HINT:
            hint = json.dumps([shared.origin])
        kind = shared.part + _PART + shared.kind if shared.part else shared.kind
        memory = (shared.data, shared.writable, shared.place)
        self.entries.append((path, kind, shared.shape, hint, False, *memory))
        self._leaves[path] = leaf

    def _attach(self, way: Sequence[_Step], leaf: _Leaf) -> None:
        """Puts an entry that this member lacks where the others have it.

        Raises:
            _Misfit: It has no place here.
        """
        at: _Leaf | _Branch = self._root
        for index, step in enumerate(way):
            while isinstance(at, _Branch) and at.is_object:
                at = at.children[""]
            if step.kind == "o":
                continue  # an object there may be a plain container here
            if not isinstance(at, _Branch) or not at.takes(step):
                raise _Misfit(f"it is in {_NAMES[step.kind]}, where this peer has {_describe(at)}")
            known = at.children.get(step.key, at.added.get(step.key))
            if known is None:
                if step.kind == "a":
                    raise _Misfit(f"a {type(at.node).__name__} here has no {step.key!r}")
                after = way[index + 1] if index + 1 < len(way) else None
                if after is not None and after.kind in ("a", "o"):
                    raise _Misfit(
                        f"it belongs to {_NAMES[after.kind]}, which only this peer's program can "
                        f"make; put one at {step.key!r}"
                    )
                known = leaf if after is None else _new_branch(after.kind)
                at.added[step.key] = known
                self._grown.append(at)
                if known is leaf:
                    return
            at = known
        raise _Misfit(f"this peer has {_describe(at)} in its place")


_NAMES = {
    "d": "a dict with string keys",
    "i": "a dict with int keys",
    "l": "a list",
    "t": "a tuple",
    "a": "a named tuple, dataclass or container of its own type",
    "o": "an object with a state dict",
}


def _describe(found: _Leaf | _Branch) -> str:
    return f"a {type(found.node).__name__}"


def _read_hint(name: str, hint: str) -> tuple[str, list[_Step]]:
    """An entry's framework and the way to it."""
    try:
        origin, *steps = json.loads(hint)
        way = [_Step(kind, key) for kind, key in steps]
        right = isinstance(origin, str) and all(
            step.kind in _NAMES and type(step.key) is (int if step.kind in "ilt" else str)
            for step in way
        )
    except (TypeError, ValueError):
        right = False
    if not right:
        raise _Misfit("the others do not say how to make it")
    if name and not way:
        raise _Misfit("it is nested too deeply to be made where it is missing")
    return origin, way


def _check_kind(origin: str, kind: str, shape: Sequence[int], size: int) -> None:
    """Checks that such a leaf of the others can be made here.

    Raises:
        _Misfit: It cannot.
    """
    if kind.startswith(PYTHON):
        if kind.removeprefix(PYTHON) not in _KINDS:
            raise _Misfit(f"this version knows no {kind}")
        return
    if _PART in kind:
        raise _Misfit(f"it is a part of a DTensor ({kind}), which pccl cannot make; put one there")
    try:
        made = _arrays.adopt(origin, kind, (0,), np.empty(0, np.uint8))
        found = _arrays.share(made).kind
    except (InvalidArgument, NotSupported) as error:
        raise _Misfit(error.reason) from None
    except Exception as error:
        raise _Misfit(f"no array of {kind} can be made ({error})") from error
    if found != kind:
        raise _Misfit(f"an array of {kind} becomes one of {found}")
    if math.prod(shape) * made.dtype.itemsize != size:  # type: ignore[attr-defined]
        raise _Misfit(f"{size} bytes are no {kind}{list(shape)}")


def _new_branch(kind: str) -> _Branch:
    empty: object = {"l": [], "t": ()}.get(kind, {})
    return _Branch(empty, lambda children: type(empty)())


def _has_state_dict(node: object) -> bool:
    return not isinstance(node, type) and all(
        callable(getattr(node, name, None)) for name in ("state_dict", "load_state_dict")
    )


def _steps(node: object, parts: Node) -> list[_Step]:
    """The steps to the children of `node`, in the order of `parts`."""
    if isinstance(node, dict):
        keys = sorted(node)
        return [_Step("i" if isinstance(key, int) else "d", key) for key in keys]
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        kind = "l" if isinstance(node, list) else "t"
        return [_Step(kind, index) for index in range(len(node))]
    if isinstance(node, tuple):
        return [_Step("a", name) for name in node._fields]  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(node) and len(parts.keys) == len(dataclasses.fields(node)):
        return [_Step("a", field.name) for field in dataclasses.fields(node)]
    return [_Step("a", key) for key in parts.keys]


def _share(value: object) -> Shared:
    """The bytes of a leaf."""
    encoded = encode(value)
    if encoded is None:
        return _arrays.share(value)
    kind, data = encoded
    return Shared(kind, (), np.frombuffer(data, np.uint8), False, "")


def _adopt(origin: str, kind: str, shape: tuple[int, ...], data: Array, like: object) -> object:
    """A leaf with these bytes; `like` is the old one, None for a new one of `origin`'s arrays."""
    if kind.startswith(PYTHON):
        return decode(kind, data)
    return _arrays.adopt(origin, dtype_of(kind), shape, data, like)


def dtype_of(kind: str) -> str:
    """The dtype's name in the kind of an array's entry."""
    return kind.rpartition(_PART)[2]


def encode(value: object) -> tuple[str, bytes] | None:
    """A Python value as its kind and bytes; None for arrays and what cannot be shared."""
    if value is None:
        return PYTHON + "None", b""
    if isinstance(value, bool):
        return PYTHON + "bool", bytes([value])
    if type(value) is int:
        return PYTHON + "int", f"{value:x}".encode()  # Python limits decimal digits
    if type(value) is float:
        return PYTHON + "float", struct.pack("<d", value)
    if type(value) is str:
        return PYTHON + "str", value.encode("utf-8", "surrogatepass")
    return None


def decode(kind: str, data: Array) -> object:
    """The Python value that `encode` has written."""
    raw = data.tobytes()
    name = kind.removeprefix(PYTHON)
    if name == "bool":
        return raw == b"\1"
    if name == "int":
        return int(raw, 16)
    if name == "float":
        return struct.unpack("<d", raw)[0]
    if name == "str":
        return raw.decode("utf-8", "surrogatepass")
    return None
