"""The collectives of the simple API other than all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from pccl import _settings
from pccl import collectives as general
from pccl.api import _use
from pccl.communicator import Communicator
from pccl.reduce import request, routes
from pccl.reduce.work import Work, reduce_info
from pccl.types import ReduceInfo, ReduceOp

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["allgather", "allgather_async", "alltoall", "broadcast", "reduce_scatter"]

_No = Literal[False]
_Yes = Literal[True]


class _How(TypedDict, total=False):
    """Those of `allgather` and `alltoall`."""

    out: Any
    tag: int | None
    timeout: float | None
    comm: Communicator | None


def _collect(
    func: str,
    kind: general.Kind,
    run: Callable[[request.Request], Any],
    tree: Any,
    out: Any,
    tag: int | None,
    timeout: float | None,
    comm: Communicator | None,
    *,
    return_info: bool = False,
    **how: Any,
) -> Any:
    """The result of one native call if the engine takes the arrays as they are, else of `run`."""
    limit = _settings.seconds(timeout, func)
    used = _use(comm, func)
    plain = routes.collect_plain(used._joined(func), kind, tree, out, tag, limit, **how)
    if plain is not None:
        result, info = plain
        return (result, reduce_info(info)) if return_info else result
    how |= {"out": out, "tag": tag, "timeout": timeout, "return_info": return_info}
    return run(request.make(func, used, tree, **how))


def broadcast(
    tree: Any,
    root: int = 0,
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Returns the `tree` of the member of rank `root`, on all members.

    When a member other than the root is lost it runs again among the others.

    Args:
        tree: Arrays and numbers in nested containers, as in `allreduce`, of any dtype without
            Python objects; the same structure, shapes and dtypes on all members.
        root: A rank, as of this call.
        out: Writable arrays of the same structure, shapes and dtypes to write to; may be `tree`
            itself. Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`.

    Raises:
        PeerLost: The root was lost, or another member was interrupted in this call. Inputs are as
            before.
        InvalidArgument: There is no such rank, or an array cannot be sent or written.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    kind, run = general.Kind.BROADCAST, general.broadcast
    return _collect("broadcast", kind, run, tree, out, tag, timeout, comm, root=root)


@overload
def allgather(tree: Any, *, return_info: _Yes, **how: Unpack[_How]) -> tuple[Any, ReduceInfo]: ...
@overload
def allgather(tree: Any, *, return_info: _No = False, **how: Unpack[_How]) -> Any: ...
def allgather(
    tree: Any,
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    return_info: bool = False,
    comm: Communicator | None = None,
) -> Any:
    """Stacks every member's `tree`: each array gets a new first axis, the members by rank.

    When a member is lost it runs again among the others. With `out`, which has the size for all
    members, it raises PeerLost instead.

    Args:
        tree: Arrays and numbers in nested containers, as in `allreduce`, of any dtype without
            Python objects; the same structure, shapes and dtypes on all members.
        out: Writable arrays of the same structure and dtypes to write to; one is of shape
            (members, ...) where the tree's is of shape (...). All members pass it, or none does.
            Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        return_info: Also return whose trees they are, and how the operation went.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`; NumPy's for
        numbers. With return_info=True a pair of that and a `ReduceInfo`, whose `contributors` are
        in the order of the first axis.

    Raises:
        PeerLost: A member was lost, and `out` was given; it may have been written to. Or another
            member was interrupted in this call.
        InvalidArgument: An array cannot be sent or written.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    kind, run = general.Kind.ALL_GATHER, general.allgather
    return _collect("allgather", kind, run, tree, out, tag, timeout, comm, return_info=return_info)


def allgather_async(
    tree: Any, *, out: Any = None, tag: int | None = None, comm: Communicator | None = None
) -> Work[Any]:
    """As `allgather`, without waiting: proceeds while Python computes.

    The arrays of `tree` must not be written, and those of `out` not be touched, until the result is
    there. `Work.info` is the operation's `ReduceInfo`.
    """
    func = "allgather_async"
    limit = _settings.seconds(None, func)
    made = request.make(func, _use(comm, func), tree, out=out, tag=tag, timeout=limit)
    return general.start_allgather(made)


def reduce_scatter(
    tree: Any,
    op: ReduceOp | str = "sum",
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Combines `tree` element-wise over all members; each gets the part of its rank.

    Args:
        tree: Arrays in nested containers, as in `allreduce`. The first axis of each is divided
            among the members: its length must divide by their number.
        op: As in `allreduce`.
        out: Writable arrays of the parts' shapes to write to. Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure and kinds of arrays as `tree`.

    Raises:
        PeerLost: A member was lost, or interrupted in this call. Inputs are as before, also where
            `out` is a part of them; other arrays of `out` may have been written to.
        InvalidArgument: An array cannot be reduced, written or divided.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    kind, run = general.Kind.REDUCE_SCATTER, general.reduce_scatter
    return _collect("reduce_scatter", kind, run, tree, out, tag, timeout, comm, op=op)


@overload
def alltoall(tree: Any, *, return_info: _Yes, **how: Unpack[_How]) -> tuple[Any, ReduceInfo]: ...
@overload
def alltoall(tree: Any, *, return_info: _No = False, **how: Unpack[_How]) -> Any: ...
def alltoall(
    tree: Any,
    *,
    out: Any = None,
    tag: int | None = None,
    timeout: float | None = None,
    return_info: bool = False,
    comm: Communicator | None = None,
) -> Any:
    """Gives each member its part of every member's `tree`.

    The first axis of each array has an equal part for each member, by rank. On rank r, part s of
    the result is part r of what rank s passed.

    Args:
        tree: Arrays in nested containers, as in `allreduce`, of any dtype without Python objects;
            the same structure, shapes and dtypes on all members. The length of each first axis
            must divide by the number of members.
        out: Writable arrays of the same structure, shapes and dtypes to write to; may be `tree`
            itself. Default: new arrays.
        tag: As in `allreduce`.
        timeout: As in `allreduce`.
        return_info: Also return whose parts they are, and how the operation went.
        comm: Default: the process's communicator.

    Returns:
        `out` if it was given; else the same structure, shapes and kinds of arrays as `tree`. With
        return_info=True a pair of that and a `ReduceInfo`, whose `contributors` are in the order of
        the parts.

    Raises:
        PeerLost: A member was lost, or interrupted in this call. Inputs are as before, also where
            `out` is one of them; other arrays of `out` may have been written to.
        InvalidArgument: An array cannot be sent, written or divided.
        MismatchedCall, Timeout, MasterLost, Evicted, Deadlock: As in `allreduce`.
    """
    kind, run = general.Kind.ALL_TO_ALL, general.alltoall
    return _collect("alltoall", kind, run, tree, out, tag, timeout, comm, return_info=return_info)
