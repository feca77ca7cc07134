"""Messages, all-to-all and other collectives of the torch backend, beside Gloo and after losses."""

from __future__ import annotations

import gc
import json
import re
import signal
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from made_once import made_once
from torch_jobs import Job, torch_job
from workers import Worker

from pccl import _settings
from pccl.communicator import Communicator
from pccl.errors import InvalidUsage, Timeout

pytest.importorskip("torch")
import torch
from programs import torch_messages

from pccl.adapters.torch import rendezvous, work
from pccl.adapters.torch.composed import AllToAll, Parts
from pccl.adapters.torch.mailbox import USER, Letter
from pccl.adapters.torch.messages import Messages
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.work import Queue

COMMON = [
    name
    for name, program in torch_messages.programs.items()
    if program not in torch_messages.GLOO_LACKS
]

Answers = list[dict[str, Any]]


def ends(job: Job, size: int, backend: str, names: list[str]) -> Answers:
    """Returns each rank's answers by program; all end well."""
    workers = job.start(size, partial(torch_messages.run, backend, names))
    answers = [{name: w.expect(name, 90)["answer"] for name in names} for w in workers]
    for worker in workers:
        worker.expect("done", 60)
    for worker in workers:
        worker.tell("end")
    for worker in workers:
        code = worker.ends()
        # A thread of Gloo may abort the interpreter's exit, after everything was said.
        assert code == 0 or (backend == "gloo" and code == -signal.SIGABRT), worker.stderr()
    return answers


@pytest.fixture(scope="module", params=[2, 4])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every program's answers on Gloo and on pccl."""
    size = request.param

    def run(to: Path) -> None:
        made = []
        for backend in ("gloo", "pccl"):
            with torch_job(tmp_path_factory.mktemp(backend) / "store") as job:
                made.append(ends(job, size, backend, COMMON))
        to.write_text(json.dumps(made))

    return json.loads(made_once(tmp_path_factory, f"torch-collectives-{size}", run).read_text())


@pytest.mark.parametrize("name", COMMON)
def test_a_program_has_the_results_that_it_has_on_gloo(both: list[Answers], name: str) -> None:
    gloo, pccl = ([answers[name] for answers in ranks] for ranks in both)
    assert not any(isinstance(answer, str) for answer in gloo), gloo  # an error
    assert pccl == gloo


def test_what_gloo_lacks(job: Job) -> None:
    size = 3
    names = [name for name in torch_messages.programs if name not in COMMON]
    for rank, answers in enumerate(ends(job, size, "pccl", names)):
        uneven = [rank + 1 + i for i in range(rank + 1)]
        start = rank * (rank + 1) // 2
        total = [float(3 * (start + i) + 300) for i in range(rank + 1)]
        bits = rank ^ (rank + 1) ^ (rank + 2)
        assert answers["reduce_scatter_uneven"] == [
            ["torch.float32", total],
            ["torch.int32", [bits]],
        ], uneven
        pairs = [[float(3 * n + 300), -float(3 * n + 300)] for n in (2 * rank, 2 * rank + 1)]
        assert answers["reduce_scatter_of_complex"] == [["torch.float32", pairs]] * 2
        assert answers["bools_beside_numbers"] == [
            ["torch.float32", [300.0, 303.0]],
            ["torch.bool", [True] * size],
            ["torch.int32", [300]],
            ["torch.bool", [True]],
            ["torch.float32", [3.0 * rank + 300]],
        ]
        for sender, (_, part) in enumerate(answers["all_to_all_lists_uneven"]):
            sent, _ = torch_messages.uneven_splits(sender, size)
            first = 100 * sender + sum(sent[:rank])
            assert part == [float(first + i) for i in range(sent[rank])]


def rank_of(worker: Worker, job: Job) -> int:
    return job.workers.index(worker)


def survivors(job: Job, lost: int) -> list[Worker]:
    return [worker for rank, worker in enumerate(job.workers) if rank != lost]


def end(workers: list[Worker]) -> None:
    for worker in workers:
        worker.tell("end")
    for worker in workers:
        assert worker.ends() == 0


def test_a_dead_rank_ends_the_first_send_and_receive_at_once(job: Job) -> None:
    workers = job.start(3, torch_messages.lost_before_the_first_message)
    for worker in workers:
        worker.expect("ready", 60)
    workers[2].signal(signal.SIGKILL)
    begin = time.monotonic()
    for worker in survivors(job, 2):
        send, receive, all_to_all = worker.expect("done", 60)["failures"]
        assert re.match("PeerLost: send .*rank 2 of 3 is gone", send), send
        assert re.match("PeerLost: recv .*rank 2 of 3 is gone", receive), receive
        assert re.match("PeerLost: all_to_all_single .*rank 2 of 3 is gone", all_to_all)
    assert time.monotonic() - begin < 30  # the group's timeout is 600 s
    end(survivors(job, 2))


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_dies_ends_a_receive_that_waits_for_it(job: Job, first: bool) -> None:
    # Rank 1 also runs the master of the channel to rank 2.
    workers = job.start(3, partial(torch_messages.lost_while_waiting, 1, first))
    for worker in workers:
        worker.expect("ready", 60)
    workers[1].signal(signal.SIGKILL)
    begin = time.monotonic()
    (error,) = workers[2].expect("done", 60)["failures"]
    assert re.match("PeerLost: recv .*rank 1 of 3 is gone", error), error
    assert time.monotonic() - begin < 8  # PCCL_RECONNECT_TIMEOUT is 10 s
    assert workers[2].ends() == 0
    workers[0].expect("done", 60)
    workers[0].tell("end")
    assert workers[0].ends() == 0


def test_a_rank_that_dies_in_an_all_to_all_ends_it_on_all_ranks(job: Job) -> None:
    job.start(3, torch_messages.lost_within_all_to_all)
    for worker in survivors(job, 1):
        worker.expect("ready", 60)
        for error in worker.expect("done", 60)["failures"]:
            assert re.match("PeerLost: .*rank 1 of 3 is gone", error), error
    end(survivors(job, 1))


def test_calls_that_do_not_fit_are_errors_and_break_nothing(job: Job) -> None:
    size = 3
    for worker in job.start(size, torch_messages.mismatches):
        answer = worker.expect("done", 60)
        splits, rows, dtypes, lists, *messages = answer["failures"]
        assert re.match(
            "MismatchedCall: .*rank 0 sends 2 elements to rank 2, which expects 1", splits
        )
        assert re.match("InvalidArgument: .*4 rows of input do not divide by the 3 ranks", rows)
        assert re.match("MismatchedCall: .*all_to_all_single of int", dtypes), dtypes
        assert re.match("InvalidArgument: .*3 lists of 1 tensors", lists)
        assert len(messages) == (2 if rank_of(worker, job) == 1 else 0)
        for message, count in zip(messages, (16, 8000), strict=False):
            sentence = f"InvalidArgument: .*rank 0 has {count} bytes, the tensor 12"
            assert re.match(sentence, message), message
        assert answer["total"] == [1.0] * size
        assert worker.ends() == 0


def test_a_message_without_a_thread_fails_and_blocks_no_other(job: Job) -> None:
    for worker in job.start(2, torch_messages.no_thread_can_be_started):
        answer = worker.expect("done", 60)
        for error in answer["failures"]:
            assert re.match("InvalidUsage: .*no thread for messages", error), error
        assert answer["got"] == [float(1 - rank_of(worker, job))] * 2
        assert answer["total"] == [0.0, 1.0]
        assert worker.ends() == 0


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_collective_without_a_thread_fails_and_blocks_no_other() -> None:
    jobs = Queue("test")
    done = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(InvalidUsage, match="no thread for collectives"):
            jobs.run(lambda: pytest.fail("it was refused"), "allreduce", here=False)
        jobs.run(done.set, "allreduce", here=True)
    assert done.is_set()
    done.clear()
    jobs.run(done.set, "allreduce", here=False)
    assert done.wait(60.0)
    jobs.close()


def test_a_callback_without_a_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "callbacks", work._Callbacks())
    collective = work.Work([torch.ones(2)])
    done = collective.get_future().then(lambda future: future.value())
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    collective.finish(None)
    assert done.done() and torch.equal(done.value()[0], torch.ones(2))
    work.callbacks.wait(0.0)
    assert work.callbacks._running == 0


def test_messages_wait_for_each_other_until_the_timeout(job: Job) -> None:
    workers = job.start(2, torch_messages.messages_that_nobody_receives)
    for worker in workers:
        worker.expect("waits", 60)
    time.sleep(2.5)  # the claim: they may wait this long, on both sides
    for worker in workers:
        worker.tell("go")
    for worker in workers:
        answer = worker.expect("done", 60)
        assert answer["got"] == [1.0, 1.0]
        other = 1 - rank_of(worker, job)
        send, receive, from_any = answer["failures"]
        assert re.match(f"Timeout: Timed out: .*no message .*to rank {other} with tag 9", send)
        assert re.match(f"Timeout: Timed out: .*no message .*from rank {other}", receive)
        assert re.match("Timeout: Timed out: .*no message .*from any rank", from_any)
        assert worker.ends() == 0, worker.stderr()
        assert worker.stderr() == ""


def test_a_first_message_without_the_store_is_an_error_at_once() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with torch_job(store.port) as job:
        workers = job.start(2, torch_messages.first_message_without_a_store)
        for worker in workers:
            worker.expect("ready", 60)
        del store
        for worker in workers:
            worker.tell("go")
        for worker in workers:
            (error,) = worker.expect("done", 30)["failures"]  # the group's timeout is 60 s
            assert re.match("Unreachable: (send|recv) failed: the c10d store failed", error), error
        end(workers)


def test_a_message_ends_in_time_while_its_channel_waits_for_the_store() -> None:
    answers = threading.Event()

    def make(*_: Any) -> Member:
        assert answers.wait(60.0)
        raise InvalidUsage.because("make", "no store")

    messages = Messages(0, 2, "test", make, lambda *_: None)
    errors: SimpleQueue[Exception | None] = SimpleQueue()
    data = np.zeros(1, np.uint8)
    try:
        messages.send(Letter(data, USER, 0, errors.put, 0.1, 1))
        messages.receive(Letter(data, USER, 0, errors.put, 0.1, 1))
        for _ in range(2):
            assert isinstance(errors.get(timeout=30.0), Timeout)
    finally:
        answers.set()
        messages.close()


@pytest.mark.parametrize("admitted", [False, True])
def test_ranks_meet_after_one_gave_up_on_the_way(
    admitted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 gives up while rank 1 waits to get into their group, or when both were let in."""
    monkeypatch.setenv("PCCL_BIND", "127.0.0.1")
    store = torch.distributed.HashStore()
    first, again, other = (Member(store, "pair", [0, 1], rank, 60.0, "w") for rank in (0, 0, 1))
    join = Communicator._join
    waits = threading.Event()

    def joining(self: Communicator, func: str, **options: Any) -> None:
        if self is other._comm:
            waits.set()
        if self is first._comm:
            assert waits.wait(60.0)
            if admitted:
                join(self, func, **options)
            raise Timeout.because(func, "too late")
        join(self, func, **options)

    monkeypatch.setattr(Communicator, "_join", joining)
    thread = threading.Thread(target=other.join, daemon=True)
    thread.start()
    with pytest.raises(Timeout, match="too late"):
        first.join()
    again.join()
    thread.join(60.0)
    assert sorted(again.order) == [0, 1] and other.order == again.order
    for member in (other, again):
        member.close()


def test_a_member_that_runs_the_master_waits_for_no_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PCCL_BIND", "127.0.0.1")
    store = torch.distributed.HashStore()
    first, lost = (Member(store, "pair", [0, 1], rank, 60.0, "w") for rank in (0, 1))
    thread = threading.Thread(target=lost.join, daemon=True)
    thread.start()
    first.join()
    thread.join(60.0)
    lost.comm.close()  # without a word in the store
    first.poll(lambda: first.gone() == [1], _settings.Deadline(60.0))
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < rendezvous._FAREWELL / 2


class Alone:
    """A group of one rank."""

    def all_gather(self, pairs: Any, what: str, timeout: float | None) -> None:
        for send, recv in pairs:
            recv[:] = send


class Failing(Messages):
    """Messages of which one step fails."""

    def __init__(self, step: str) -> None:
        super().__init__(0, 1, "test", lambda *_: pytest.fail("a pair"), lambda *_: None)
        self.step = step

    def _fail(self, step: str) -> None:
        if step == self.step:
            raise Timeout.because(step, "a failure")

    def prepare(self, *_: Any) -> None:
        self._fail("prepare")

    def exchange(self, *_: Any) -> None:
        self._fail("exchange")
        super().exchange(1, {1: np.zeros(1, np.uint8)}, {}, 60.0)

    def send(self, letter: Letter) -> None:
        try:
            self._fail("send")
        except Timeout as error:
            letter.done(error)


@pytest.mark.parametrize("step", ["prepare", "exchange", "send"])
def test_a_failed_all_to_all_is_freed_with_its_error(step: str) -> None:
    gc.disable()
    try:
        parts = Parts([np.zeros(8, np.uint8)], [np.zeros(8, np.uint8)], 1)
        call = AllToAll(Alone(), Failing(step), 0, 1, parts)
        with pytest.raises(Timeout, match="a failure"):
            call.run("all_to_all", "all_to_all of uint8", 60.0)
        there = weakref.ref(call)
        del call
        assert there() is None
    finally:
        gc.enable()
