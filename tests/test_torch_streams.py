"""Work on a CUDA device is ordered with the caller's stream. Streams of a stand-in are late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from members import Members, in_threads

torch = pytest.importorskip("torch")

import pretend_cuda  # noqa: E402
from pretend_cuda import late, read  # noqa: E402

import pccl  # noqa: E402
from pccl.adapters.torch import devices, tensors  # noqa: E402
from pccl.adapters.torch.devices import Cuda, after_caller  # noqa: E402
from pccl.reduce import pieces  # noqa: E402

Comm = pccl.Communicator
VALUES = torch.arange(300.0)


@pytest.fixture
def alone(members: Members, monkeypatch: pytest.MonkeyPatch) -> Comm:
    """A member by itself, whose tensors are reduced in pieces of 256 bytes."""
    monkeypatch.setattr(devices, "torch", pretend_cuda.Torch())
    monkeypatch.setattr(Cuda, "_made", {})
    monkeypatch.setattr(tensors, "devices_in_use", lambda: True)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    return members(1)[0]


def an_input_is_read_after_the_work_before_the_call(comm: Comm) -> None:
    assert torch.equal(read(pccl.allreduce(late(VALUES), comm=comm)), VALUES)
    strided = late(VALUES.reshape(20, 15)).t()
    assert torch.equal(read(pccl.allreduce(strided, comm=comm)), VALUES.reshape(20, 15).t())


def a_result_is_there_when_the_call_returns(comm: Comm) -> None:
    made = pccl.allreduce(late(VALUES), comm=comm)
    after = late(torch.zeros(300)).copy_(made)
    assert torch.equal(read(after), VALUES)


def an_output_is_written_after_the_work_before_the_call(comm: Comm) -> None:
    out = late(torch.full((300,), 7.0))
    before = late(torch.zeros(300)).copy_(out)
    assert pccl.allreduce(late(VALUES), out=out, comm=comm) is out
    after = late(torch.zeros(300)).copy_(out)
    assert torch.equal(read(before), torch.full((300,), 7.0))
    assert torch.equal(read(after), VALUES) and torch.equal(read(out), VALUES)


def a_call_that_returns_early_is_ordered_alike(comm: Comm) -> None:
    out = late(torch.full((300,), 7.0))
    work = pccl.allreduce_async(late(VALUES), out=out, comm=comm)
    before = late(torch.zeros(300)).copy_(out)
    assert torch.equal(read(late(torch.zeros(300)).copy_(work.wait())), VALUES)
    assert torch.equal(read(before), torch.full((300,), 7.0))


def memory_that_earlier_work_reads_is_not_written(comm: Comm) -> None:
    x, kept, old = late(VALUES), late(torch.zeros(300)), late(torch.full((300,), 9.0))
    read(x)
    kept.copy_(old)
    pretend_cuda.give_back(old)
    made = pccl.allreduce(x, comm=comm)
    assert torch.equal(read(kept), torch.full((300,), 9.0))
    assert torch.equal(read(made), VALUES)


def another_thread_goes_on_where_the_caller_is(comm: Comm) -> None:
    """As the thread of a c10d group, which writes results back."""
    target, source = late(torch.full((300,), 7.0)), late(VALUES)
    before = late(torch.zeros(300)).copy_(target)
    ordered = after_caller([target])

    def write() -> None:
        with ordered():
            target.copy_(source)

    assert in_threads([write]) == [None]
    after = late(torch.zeros(300)).copy_(target)
    assert torch.equal(read(before), torch.full((300,), 7.0))
    assert torch.equal(read(after), VALUES)


Scenario = Callable[[Comm], None]
SCENARIOS: list[Scenario] = [
    an_input_is_read_after_the_work_before_the_call,
    a_result_is_there_when_the_call_returns,
    an_output_is_written_after_the_work_before_the_call,
    a_call_that_returns_early_is_ordered_alike,
    memory_that_earlier_work_reads_is_not_written,
    another_thread_goes_on_where_the_caller_is,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_work_is_done_in_order(alone: Comm, scenario: Scenario) -> None:
    scenario(alone)
    side = pretend_cuda.Stream()
    with pretend_cuda.stream(side):
        scenario(alone)


def no_wait_for_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "wait_for_caller", lambda self: None)


def no_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretend_cuda.Event, "synchronize", lambda self: None)


def no_wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def copies(self: Any) -> Iterator[None]:
        with pretend_cuda.stream(self._stream):
            yield

    monkeypatch.setattr(Cuda, "copies", copies)


@pytest.mark.parametrize(
    ("remove", "scenario"),
    [
        (no_wait_for_the_caller, an_input_is_read_after_the_work_before_the_call),
        (no_wait_for_the_caller, a_result_is_there_when_the_call_returns),
        (no_wait_for_the_caller, memory_that_earlier_work_reads_is_not_written),
        (no_wait_for_the_caller, another_thread_goes_on_where_the_caller_is),
        (no_wait_for_copies, an_input_is_read_after_the_work_before_the_call),
        (no_wait_for_copies, a_result_is_there_when_the_call_returns),
        (no_wait_for_copies, a_call_that_returns_early_is_ordered_alike),
        (no_wait_at_the_end, another_thread_goes_on_where_the_caller_is),
    ],
    ids=lambda part: part.__name__,
)
def test_a_missing_wait_is_found(
    alone: Comm,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[pytest.MonkeyPatch], None],
    scenario: Scenario,
) -> None:
    remove(monkeypatch)
    with pytest.raises(AssertionError):
        scenario(alone)


ODD = torch.device("privateuseone", 0)


class Odd:
    """A stand-in for torch with another accelerator, which notes what it is set to.

    `events`: of its streams, one after the other; an error in place of one that cannot be made.
    """

    def __init__(self, *events: Exception | None) -> None:
        self.set: list[str] = []
        self.accelerator = SimpleNamespace(
            current_device_index=lambda: 3,
            set_device_index=lambda index: self.set.append(f"device {index}"),
            current_stream=lambda device: self._stream(),
            set_stream=lambda stream: self.set.append("stream"),
        )
        self._events = list(events)

    def _stream(self) -> Any:
        return SimpleNamespace(device=ODD, record_event=self._record_event)

    def _record_event(self) -> Any:
        if (error := self._events.pop(0)) is not None:
            raise error
        return SimpleNamespace(synchronize=lambda: None)


def of_odd(monkeypatch: pytest.MonkeyPatch, *events: Exception | None) -> tuple[Odd, Any]:
    """That device, and a way for another thread to follow this one on it."""
    odd: Any = Odd(*events)
    monkeypatch.setattr(devices, "torch", odd)
    monkeypatch.setattr(devices, "other_accelerators", lambda: ["privateuseone"])
    devices._has_events.cache_clear()
    tensor: Any = SimpleNamespace(device=ODD)
    return odd, after_caller([tensor])


def test_a_device_without_events_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    odd, ordered = of_odd(monkeypatch, RuntimeError("backend doesn't support events"))
    assert ordered is nullcontext
    assert after_caller([SimpleNamespace(device=ODD)]) is nullcontext  # type: ignore[list-item]
    assert odd.set == []


def test_a_threads_stream_is_restored_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = ["stream", "stream", "device 3"]
    odd, ordered = of_odd(monkeypatch, None, None)
    with ordered():
        pass
    assert odd.set == restored
    odd, ordered = of_odd(monkeypatch, None, RuntimeError("lost"))
    with pytest.raises(RuntimeError, match="lost"), ordered():
        pass
    assert odd.set == restored
    odd, ordered = of_odd(monkeypatch, None, RuntimeError("lost"))
    with pytest.raises(ValueError, match="first"), ordered():
        raise ValueError("first")
    assert odd.set == restored
