"""Programs of torch.distributed give on backend "pccl" what they give on Gloo."""

from __future__ import annotations

import gc
import json
import pickle
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from workers import start

from pccl import errors

pytest.importorskip("torch")
import torch
import torch.distributed as dist
from programs import torch_alike, torch_calls
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.two_tensor import TwoTensor

from pccl.adapters.torch.monitored_barrier import monitored_barrier
from pccl.adapters.torch.process_group import ProcessGroup, create

LIMIT = 180  # seconds; a program that hangs is no program that is slow


def ends(
    name: str, backend: str, size: int, folder: Path, dies: int | None = None
) -> list[tuple[int, bytes, bytes]]:
    """How every rank exits, and what it prints. The last one dies in its call of that number."""
    store = folder / f"store-{backend}"
    deadline = time.monotonic() + LIMIT
    with ExitStack() as stack:
        found = []
        for rank in range(size):
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            process = start(
                partial(torch_alike.run, name, backend),
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                RANK=str(rank),
                SIZE=str(size),
                STORE=str(store),
                GLOO_SOCKET_IFNAME="lo",
                PCCL_BIND="127.0.0.1",
                **({"DIES_IN_CALL": str(dies)} if dies and rank == size - 1 else {}),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append((process, files))
        codes = [process.wait(max(deadline - time.monotonic(), 0)) for process, _ in found]
        for _, files in found:
            for file in files:
                file.seek(0)
        said = [[file.read() for file in files] for _, files in found]
        return [(code, *words) for code, words in zip(codes, said, strict=True)]


def run(name: str, backend: str, size: int, folder: Path) -> list[Any]:
    """Returns each rank's result. All ranks exit, and exit well."""
    found = ends(name, backend, size, folder)
    for code, output, error in found:
        # A thread of Gloo may abort the interpreter's exit, after everything was printed.
        aborted = backend == "gloo" and code == -signal.SIGABRT and output
        assert code == 0 or aborted, error.decode()
    return [json.loads(output) for _, output, _ in found]


PROGRAMS = [
    ("power_sgd", 2),
    ("python_hooks", 2),
    ("builtin_hooks", 2),
    ("join", 3),
    ("fsdp1", 2),
    ("callback_starts_a_collective", 3),
    ("dropped_work", 2),
    ("storages_stay_resizable", 2),
    ("one_element_views", 3),
    ("shapes_of_one_size", 3),
    ("late_rank_at_a_barrier", 3),
    ("monitored_barrier", 3),
    ("models_that_differ", 3),
    ("profiler", 2),
    ("compiled_ddp", 2),
    ("compiled_collectives", 3),
    ("every_public_call", 3),
]


@pytest.mark.parametrize(("name", "size"), PROGRAMS)
def test_a_program_gives_on_pccl_what_it_gives_on_gloo(
    name: str, size: int, tmp_path: Path
) -> None:
    gloo, ours = (run(name, backend, size, tmp_path) for backend in ("gloo", "pccl"))
    assert ours == gloo


def test_no_public_call_is_forgotten() -> None:
    covered = torch_calls.CALLS.keys() | torch_calls.LEFT_OUT.keys()
    assert torch_calls.public() <= covered
    assert not torch_calls.CALLS.keys() & torch_calls.LEFT_OUT.keys()


# The last rank makes a second collective there.
LOSING = [
    "power_sgd",
    "python_hooks",
    "builtin_hooks",
    "join",
    "fsdp1",
    "callback_starts_a_collective",
    "compiled_ddp",
    "compiled_collectives",
]


@pytest.mark.parametrize("name", LOSING)
def test_every_rank_of_a_program_ends_when_one_is_killed(name: str, tmp_path: Path) -> None:
    *others, (code, _, _) = ends(name, "pccl", 3, tmp_path, dies=2)
    assert code == -signal.SIGKILL
    for code, output, error in others:
        assert (code, output) == (1, b""), error.decode()
        assert b"PeerLost" in error, error.decode()


@pytest.mark.parametrize("cls", [errors.PeerLost, errors.Timeout, errors.MismatchedCall])
def test_an_error_of_a_collective_is_both_pccls_and_torchs(cls: type[errors.PCCLError]) -> None:
    from pccl.adapters.torch.errors import as_torch_error

    made = as_torch_error(cls.because("allreduce", "rank 1 is gone"))
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert isinstance(error, cls)
        assert isinstance(error, dist.DistBackendError)
        assert "rank 1 is gone" in str(error)
        assert ("Timed out" in str(error)) == (cls is errors.Timeout)


@pytest.fixture
def alone() -> Iterator[ProcessGroup]:
    """A group of one rank, which `torch.distributed` does not know."""
    options = SimpleNamespace(
        group_rank=0,
        group_size=1,
        store=None,
        timeout=timedelta(seconds=60),
        group_id="alone",
        global_ranks_in_group=[0],
    )
    group = create(options)
    yield group
    group.shutdown()


def test_a_lost_group_keeps_no_tensors(
    alone: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: Any, **__: Any) -> None:
        raise errors.MasterLost.because("allreduce", "no master")

    monkeypatch.setattr(alone, "_member", SimpleNamespace(loss=lambda error: error))
    monkeypatch.setattr(alone, "_exchange", SimpleNamespace(all_reduce=lose))
    gc.disable()
    try:
        tensor = torch.ones(2)
        with pytest.raises(errors.MasterLost):
            alone.allreduce([tensor]).wait()
        there = weakref.ref(tensor)
        del tensor
        assert there() is None
    finally:
        gc.enable()
    with pytest.raises(errors.MasterLost):  # as in every later call
        alone.allreduce([torch.ones(2)]).wait()
    monkeypatch.undo()


def calls_that_are_not_supported(group: ProcessGroup) -> dict[str, list[Any]]:
    dense = torch.ones(2)
    sparse = dense.to_sparse()
    return {
        "allreduce": [
            lambda: group.allreduce(dense, dist.ReduceOp.BAND),
            lambda: group.allreduce(sparse, dist.ReduceOp.MAX),
            lambda: group.allreduce(torch.zeros(2, dtype=torch.float8_e5m2fnuz)),
        ],
        "broadcast": [lambda: group.broadcast(sparse, 0)],
        "allgather": [
            lambda: group.allgather([[dense]], [sparse]),
            lambda: group.allgather([[sparse]], [dense]).wait(),
        ],
        "recv": [lambda: group.recv_anysource([sparse])],
        "split_group": [group.split_group],
    }


def test_what_is_not_supported_is_an_error_of_torchs_with_the_functions_name(
    alone: ProcessGroup,
) -> None:
    for func, calls in calls_that_are_not_supported(alone).items():
        for call in calls:
            with pytest.raises(errors.NotSupported, match=f"^{func} failed: ") as found:
                call()
            assert isinstance(found.value, dist.DistBackendError)


@pytest.mark.parametrize("rank", [-1, 1])
def test_a_rank_that_is_not_in_the_group_is_refused(alone: ProcessGroup, rank: int) -> None:
    one = torch.ones(2)
    calls: dict[str, Any] = {
        "broadcast": lambda: alone.broadcast(one, rank),
        "reduce": lambda: alone.reduce(one, rank),
        "gather": lambda: alone.gather([torch.ones(2)], one, rank),
        "scatter": lambda: alone.scatter(one, [torch.ones(2)], rank),
        "send": lambda: alone.send([one], rank),
        "recv": lambda: alone.recv([one], rank),
    }
    for func, call in calls.items():
        with pytest.raises(errors.InvalidArgument, match=f"^{func} failed: invalid rank {rank} "):
            call()


class Told:
    """A member of a group of two, with a store of its own."""

    size = 2

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.last_word = ""  # of rank 0, before it leaves

    def say(self, what: str) -> None:
        self.words.add(what)

    def said(self, what: str, rank: int) -> bool:
        return what in self.words

    def gone(self) -> list[int]:
        self.words.add(self.last_word)
        return [0] if self.last_word else []

    def poll(self, is_there: Callable[[], bool], deadline: Any) -> None:
        if not is_there():
            raise errors.Timeout.because("poll", "late")


def test_a_monitored_barrier_counts_no_rank_that_gave_up() -> None:
    member: Any = Told()
    with pytest.raises(errors.Timeout, match="Rank 1 successfully reached"):
        monitored_barrier(member, 1, 0, 1.0, False)
    with pytest.raises(errors.Timeout, match="Rank 1 failed to pass"):
        monitored_barrier(member, 0, 0, 1.0, False)
    assert "monitored-0-passed" not in member.words


def test_a_monitored_barrier_is_passed_though_rank_0_leaves_at_once() -> None:
    member: Any = Told()
    member.last_word = "monitored-0-passed"
    monitored_barrier(member, 1, 0, 1.0, False)


def test_a_monitored_barrier_is_known_by_the_group(alone: ProcessGroup) -> None:
    dist.monitored_barrier(alone)  # not by the name of its backend, of which there are several


def test_a_write_to_a_tensor_of_inference_mode_may_be_on_any_thread(alone: ProcessGroup) -> None:
    with torch.inference_mode():
        tensor = torch.arange(6.0).reshape(2, 3).t()
        options = dist.AllreduceOptions()
        options.asyncOp = True
        alone.allreduce([tensor], options).wait()
        assert tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_copies_are_in_cpu_memory_whatever_the_default_device(alone: ProcessGroup) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    sparse = torch.ones(2).to_sparse()
    with torch.device("meta"):
        alone.allreduce([tensor]).wait()
        alone.allreduce([sparse]).wait()
    assert tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert sparse.to_dense().tolist() == [1.0, 1.0]


def test_results_under_way_are_taken_and_other_wrappers_refused(alone: ProcessGroup) -> None:
    result = AsyncCollectiveTensor(torch.ones(2))
    outputs = [torch.zeros(2)]
    alone.allgather([outputs], [result]).wait()
    assert outputs[0].tolist() == [1.0, 1.0]
    with pytest.raises(errors.NotSupported, match="^allreduce failed: a TwoTensor has no elements"):
        alone.allreduce([TwoTensor(torch.ones(2), torch.ones(2))])


def test_calls_of_a_destroyed_group_are_errors_of_torchs(alone: ProcessGroup) -> None:
    alone.shutdown()
    calls: dict[str, Any] = {
        "allreduce": lambda: alone.allreduce([torch.ones(2)]),
        "send": lambda: alone.send([torch.ones(2)], 1),
        "monitored_barrier": alone.monitored_barrier,
    }
    for func, call in calls.items():
        with pytest.raises(errors.InvalidUsage, match=f"^{func} failed: .*destroyed") as found:
            call()
        assert isinstance(found.value, dist.DistBackendError)
