"""The one rule by which nested containers become a list of arrays, the same for all frameworks.

Dict keys sorted, lists, tuples and named tuples by position, dataclasses by field; None is no leaf.
Other container types that are registered with JAX are flattened by JAX, when the program has loaded
it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from pccl.errors import InvalidArgument
from pccl.frameworks import Buffer, Node, find_adapter, flatten_registered, parts_of

_Build = Callable[[Iterator[object]], object]
_DESCRIBED = 3  # arrays that a description names before it only counts


class Tree(NamedTuple):
    """A flattened tree.

    Attributes:
        paths: Where each leaf is, e.g. "['layers'][0].bias"; "" when the tree is itself a leaf.
        leaves: The leaves, in the order that all members share.
        build: Makes the same structure around other leaves, taken from an iterator.
        nones: Where None stands: no leaf, but a part of the structure.
    """

    paths: list[str]
    leaves: list[object]
    build: _Build
    nones: list[str]

    def unflatten(self, leaves: Sequence[object]) -> Any:
        """The same structure with these leaves."""
        return self.build(iter(leaves))


class Entry(NamedTuple):
    """An array of a tree: where it is, the name of its dtype, its shape."""

    path: str
    kind: str
    shape: tuple[int, ...]


def flatten(tree: object, func: str, name: str = "tree") -> Tree:
    """Flattens `tree`.

    Args:
        tree: Nested containers; what is no container is a leaf, whatever it is.
        func: The user's call, for errors.
        name: What errors call the tree.

    Raises:
        InvalidArgument: Dict keys are not all strings or all ints, or containers contain
            themselves.
    """
    flat = Tree([], [], lambda leaves: None, [])
    try:
        return flat._replace(build=_walk(tree, "", flat, func, name))
    except RecursionError:
        sentence = f"{name} is nested too deeply, or contains itself"
        raise InvalidArgument.because(func, sentence) from None


def flatten_operands(tree: object, func: str) -> Tree:
    """Flattens what a collective call is given.

    Raises:
        InvalidArgument: As `flatten`, or there is nothing to send.
    """
    flat = flatten(tree, func)
    if not flat.leaves:
        sentence = "tree has no array in it"
        if flat.nones:
            sentence += (
                f", only None (at tree{flat.nones[0]}); a gradient is None before backward()"
            )
        raise InvalidArgument.because(func, sentence)
    return flat


def _walk(node: object, path: str, flat: Tree, func: str, name: str) -> _Build:
    if node is None:
        flat.nones.append(path)
        return lambda leaves: None
    found = parts(node, path, func, name)
    if found is None:
        flat.paths.append(path)
        flat.leaves.append(node)
        return next
    builds = [
        _walk(child, path + key, flat, func, name)
        for key, child in zip(found.keys, found.children, strict=True)
    ]
    rebuild = found.rebuild
    return lambda leaves: rebuild([build(leaves) for build in builds])


def parts(node: object, path: str, func: str, name: str) -> Node | None:
    """One level of `node`; None when it is a leaf."""
    # Ours before JAX's: an OrderedDict must not depend on whether this member has loaded jax.
    if type(node) in (dict, OrderedDict, defaultdict):
        return _dict_parts(node, path, func, name)  # type: ignore[arg-type]
    if type(node) in (list, tuple):
        return _sequence_parts(node)  # type: ignore[arg-type]
    if isinstance(node, np.ndarray | np.generic | int | float | complex | str | bytes):
        return None
    if find_adapter(node) is not None:
        return None
    registered = flatten_registered(node)
    if registered is not None:
        return registered
    if isinstance(node, dict):
        return _dict_parts(node, path, func, name)
    if isinstance(node, list | tuple):
        return _sequence_parts(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        if hasattr(type(node), "__dlpack__"):
            return None  # an array that happens to be written as a dataclass
        return _dataclass_parts(node)
    return None


def _dict_parts(node: dict[Any, object], path: str, func: str, name: str) -> Node:
    keys = list(node)
    if all(isinstance(key, str) for key in keys):
        written = str.__repr__
    elif all(isinstance(key, int) and not isinstance(key, bool) for key in keys):
        written = int.__repr__
    else:
        kinds = ", ".join(sorted({type(key).__name__ for key in keys}))
        sentence = f"{name}{path} has keys of type {kinds}; only strings, or only ints, will do"
        raise InvalidArgument.because(func, sentence)
    keys.sort()

    def rebuild(children: Sequence[object]) -> object:
        made = copy.copy(node)  # keeps its type, order of insertion and default factory
        for key, child in zip(keys, children, strict=True):
            # Not a subclass's own `__setitem__`: nothing may fail here.
            dict.__setitem__(made, key, child)
        return made

    return Node([f"[{written(key)}]" for key in keys], [node[key] for key in keys], rebuild)


def _sequence_parts(node: Sequence[object]) -> Node:
    fields = getattr(node, "_fields", None)
    if isinstance(node, tuple) and fields is not None:
        make: Callable[[Any], object] = type(node)._make  # type: ignore[attr-defined]
        return Node([f".{field}" for field in fields], node, make)

    def rebuild(children: Sequence[object]) -> object:
        if isinstance(node, tuple):
            return tuple_like(node, children)
        if type(node) is list:
            return list(children)
        made = copy.copy(node)
        list.__setitem__(cast("list[object]", made), slice(None), children)
        return made

    return Node([f"[{index}]" for index in range(len(node))], node, rebuild)


def tuple_like(node: tuple[object, ...], children: Sequence[object]) -> object:
    """A tuple of the type of `node`; a plain one where its type does not take these children.

    Nothing may fail here: the others have their results by now.
    """
    kind = type(node)
    try:
        return tuple.__new__(kind, children)
    except TypeError:
        pass  # its type is written in C: torch.Size, struct sequences such as those of torch.max
    try:
        if hasattr(kind, "n_sequence_fields"):
            _, (_, more) = cast("Any", node.__reduce__())
            return kind(children, more)  # type: ignore[call-arg]
        return kind(children)
    except Exception:  # torch.Size takes no means, and no program can make a sys.version_info
        return tuple(children)


def _dataclass_parts(node: Any) -> Node:
    names = [field.name for field in dataclasses.fields(node)]

    def rebuild(children: Sequence[object]) -> object:
        # Not by the constructor: it may check or convert, and some fields are not its arguments.
        made = copy.copy(node)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(made, name, child)
        return made

    return Node([f".{name}" for name in names], [getattr(node, name) for name in names], rebuild)


def entries_of(
    paths: Sequence[str], buffers: Sequence[Sequence[Buffer]], leaves: Sequence[object] = ()
) -> list[Entry]:
    """The arrays of a tree, from the buffers of each leaf.

    Args:
        paths: Where each leaf is.
        buffers: Those of each leaf.
        leaves: The leaves, if they may be spread: entries tell which part of one a buffer is.
    """
    parts = [parts_of(leaf) for leaf in leaves] or [()] * len(paths)
    return [
        Entry(f"{path} {part}".strip(), buffer.dtype.label, buffer.array.shape)
        for path, found, places in zip(paths, buffers, parts, strict=True)
        for buffer, part in zip(found, places or [""] * len(found), strict=True)
    ]


def outlines(buffers: Sequence[Buffer]) -> list[Entry]:
    """The arrays of one leaf, without its path."""
    return entries_of([""], [buffers])


def structure(entries: Sequence[Entry], nones: Sequence[str] = ()) -> bytes:
    """All that must be equal on all members, for a hash: paths, dtypes, shapes, places of None."""
    arrays = [f"{path}:{kind}:{shape}" for path, kind, shape in entries]
    return "\n".join([*arrays, *(f"{path}:None" for path in nones)]).encode()


def describe(entries: Sequence[Entry], nones: Sequence[str] = ()) -> str:
    """A few words for error sentences: "['b'] float32[4], ['w'] float32[3,4]"."""
    named = [f"{path} {_words(kind, shape)}".lstrip() for path, kind, shape in entries]
    if len(named) > _DESCRIBED:
        elements = sum(math.prod(shape) for _, _, shape in entries)
        more = f"{len(named) - _DESCRIBED} more arrays, {elements} elements in all"
        named = [*named[:_DESCRIBED], more]
    if nones:
        named.append("None at " + ", ".join(nones[:_DESCRIBED]))
    if len(nones) > _DESCRIBED:
        named.append(f"{len(nones) - _DESCRIBED} more None")
    return ", ".join(named) or "no arrays"


def describe_buffer(buffer: Buffer) -> str:
    """One array in a few words: "float32[3,4]"."""
    return _words(buffer.dtype.label, buffer.array.shape)


def _words(kind: str, shape: Sequence[int]) -> str:
    return f"{kind}[{','.join(map(str, shape))}]"
