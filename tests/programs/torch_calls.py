"""Every public function of torch.distributed, called once by three ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Not compared, and the reason.
LEFT_OUT = {
    "breakpoint": "waits for a terminal",
    "destroy_process_group": "ends every program of this suite",
    "get_backend": "names the backend",
    "get_backend_config": "names the backend",
    "init_process_group": "begins every program of this suite",
    "is_torchelastic_launched": "is about torchrun",
    "register_rendezvous_handler": "is about rendezvous, before a backend is chosen",
    "rendezvous": "is about rendezvous, before a backend is chosen",
    "shrink_group": "Gloo refuses it",
    "split_group": "Gloo refuses it",
}


def public() -> set[str]:
    """The functions of this torch."""
    return {
        name
        for name, value in vars(dist).items()
        if not name.startswith("_") and name != "reduce_op" and inspect.isfunction(value)
    }


def mine(count: int = 3) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 10 * dist.get_rank()


def parts() -> list[Tensor]:
    """One for each rank."""
    return list(mine().split(1))


def empty(elements: int) -> list[Tensor]:
    """One for each rank."""
    return [torch.zeros(elements) for _ in range(3)]


def on(rank: int, value: Any) -> Any:
    """The value on that rank, and None on the others."""
    return value if dist.get_rank() == rank else None


def into(out: Any, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Returns `out` after the call has written to it."""
    call(*given, **named)
    return out


def neighbours() -> tuple[int, int]:
    return (dist.get_rank() + 1) % 3, (dist.get_rank() + 2) % 3


def batch_isend_irecv() -> Any:
    out, (after, before) = torch.zeros(3), neighbours()
    ops = [dist.P2POp(dist.isend, mine(), after), dist.P2POp(dist.irecv, out, before)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def messages(send: Any, receive: Any) -> Any:
    """From rank 0 to rank 1 and on to rank 2; `isend` and `irecv` give work to wait for."""
    out, rank = torch.zeros(3), dist.get_rank()
    if rank > 0 and hasattr(work := receive(out, rank - 1), "wait"):
        work.wait()
    if rank < 2 and (work := send(out + mine(), rank + 1)):
        work.wait()
    return out


def objects() -> Any:
    """From rank 2 to rank 0."""
    out = [None, None]
    if dist.get_rank() == 2:
        dist.send_object_list(["text", {"step": 7}], 0)
    elif dist.get_rank() == 0:
        dist.recv_object_list(out, 2)
    return out


def sum_in(group: Any) -> Any:
    """Returns the sum over the group, and its own tensor on a rank outside."""
    out = mine()
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(out, group=group)
    return out


def subgroups(made: Any) -> Any:
    own, all_of_them = made
    return [sum_in(own), [dist.get_process_group_ranks(group) for group in all_of_them]]


def pair() -> Any:
    return dist.new_group([0, 2])


def place_in_pair(call: Callable[..., int], rank: int) -> int | None:
    group = pair()
    return None if dist.get_rank() == 1 else call(group, rank)


def recorded() -> Any:
    with dist.record_comm("named"):
        return sum_in(None)


def mesh() -> Any:
    made = dist.init_device_mesh("cpu", (3,), mesh_dim_names=("all",))
    return [made.get_local_rank(), sum_in(made.get_group())]


def local_rank() -> Any:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    return dist.get_node_local_rank()


CALLS: dict[str, Callable[[], Any]] = {
    "all_gather": lambda: into(out := empty(3), dist.all_gather, out, mine()),
    "all_gather_coalesced": lambda: into(
        out := [[one] for one in empty(3)], dist.all_gather_coalesced, out, [mine()]
    ),
    "all_gather_into_tensor": lambda: into(
        out := torch.zeros(9), dist.all_gather_into_tensor, out, mine()
    ),
    "all_gather_object": lambda: into(
        out := [None] * 3, dist.all_gather_object, out, {"rank": dist.get_rank()}
    ),
    "all_gather_single": lambda: into(out := torch.zeros(9), dist.all_gather_single, out, mine()),
    "all_reduce": lambda: into(out := mine(), dist.all_reduce, out),
    "all_reduce_coalesced": lambda: into(out := [mine(), mine(5)], dist.all_reduce_coalesced, out),
    "all_to_all": lambda: into(out := empty(1), dist.all_to_all, out, parts()),
    "all_to_all_single": lambda: into(out := torch.zeros(3), dist.all_to_all_single, out, mine()),
    "barrier": lambda: dist.barrier(),
    "batch_isend_irecv": batch_isend_irecv,
    "broadcast": lambda: into(out := mine(), dist.broadcast, out, 1),
    "broadcast_object_list": lambda: into(
        out := [dist.get_rank(), "text"], dist.broadcast_object_list, out, 2
    ),
    "gather": lambda: into(out := empty(3), dist.gather, mine(), on(1, out), 1),
    "gather_object": lambda: into(
        out := [None] * 3, dist.gather_object, {"rank": dist.get_rank()}, on(1, out), 1
    ),
    "get_default_backend_for_device": lambda: dist.get_default_backend_for_device("cpu"),
    "get_global_rank": lambda: place_in_pair(dist.get_global_rank, 1),
    "get_group_rank": lambda: place_in_pair(dist.get_group_rank, 2),
    "get_node_local_rank": local_rank,
    "get_pg_count": lambda: [pair() and None, dist.get_pg_count()],
    "get_process_group_ranks": lambda: dist.get_process_group_ranks(None),
    "get_rank": lambda: dist.get_rank(),
    "get_world_size": lambda: dist.get_world_size(),
    "init_device_mesh": mesh,
    "irecv": lambda: messages(dist.isend, dist.irecv),
    "is_available": lambda: dist.is_available(),
    "is_backend_available": lambda: dist.is_backend_available(dist.get_backend()),
    "is_initialized": lambda: dist.is_initialized(),
    "isend": lambda: messages(dist.isend, dist.recv),
    "monitored_barrier": lambda: dist.monitored_barrier(),
    "new_group": lambda: sum_in(pair()),
    "new_subgroups": lambda: subgroups(dist.new_subgroups(3)),
    "new_subgroups_by_enumeration": lambda: subgroups(
        dist.new_subgroups_by_enumeration([[0, 2], [1]])
    ),
    "record_comm": recorded,
    "recv": lambda: messages(dist.send, dist.recv),
    "recv_object_list": objects,
    "reduce": lambda: on(2, into(out := mine(), dist.reduce, out, 2)),
    "reduce_scatter": lambda: into(out := torch.zeros(1), dist.reduce_scatter, out, parts()),
    "reduce_scatter_single": lambda: into(
        out := torch.zeros(1), dist.reduce_scatter_single, out, mine()
    ),
    "reduce_scatter_tensor": lambda: into(
        out := torch.zeros(1), dist.reduce_scatter_tensor, out, mine()
    ),
    "scatter": lambda: into(out := torch.zeros(1), dist.scatter, out, on(1, parts()), 1),
    "scatter_object_list": lambda: into(
        out := [None], dist.scatter_object_list, out, on(1, ["a", 2, None]), 1
    ),
    "send": lambda: messages(dist.send, dist.irecv),
    "send_object_list": objects,
    "supports_complex": lambda: dist.supports_complex(dist.ReduceOp.SUM),
}
for known in ("gloo", "mpi", "nccl", "ucc", "xccl"):
    CALLS[f"is_{known}_available"] = getattr(dist, f"is_{known}_available")


def plain(answer: Any) -> Any:
    """With lists in the place of tensors."""
    if isinstance(answer, Tensor):
        return answer.tolist()
    return [plain(one) for one in answer] if isinstance(answer, list) else answer


def all_of_them() -> dict[str, Any]:
    """Their results, of those that this torch has."""
    return {name: plain(CALLS[name]()) for name in sorted(CALLS.keys() & public())}
