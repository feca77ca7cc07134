"""Works and the queue of a c10d group: collectives under way, and the order in which they run."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from _pccl_torch import class_untraced
from pccl.adapters.torch.errors import as_torch_error, fresh
from pccl.errors import InvalidUsage, Timeout

_c10d: Any = torch._C._distributed_c10d  # typed in part
_Class = TypeVar("_Class")

JOINING = "init_process_group"
DESTROYED = "this process group was destroyed"
_ENDING = 15.0  # seconds that threads of a group that is gone may take; longer than the farewell
_IDLE = 5.0  # seconds after which a thread for callbacks ends


def all_untraced(cls: type[_Class]) -> type[_Class]:
    """Keeps torch.compile from the public methods."""
    class_untraced(cls)
    return cls


class _Failure:
    """The value of a failed work's future in C++: reading tensors from it raises the error.

    From Python only a future's own callback can give it an error, and that makes another future.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise fresh(self._error)


class _Outcome:
    """The state of a collective under way. *any thread*"""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self.results = list(results)
        self.error: Exception | None = None
        self.over = threading.Event()
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self.in_cpp: torch.futures.Future[Any] | None = None  # the future that C++ sees
        self._at_end: list[Callable[[], None]] = []

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls `call` on the thread that ends the collective, or here if it has ended."""
        with self._lock:
            if not self.over.is_set():
                self._at_end.append(call)
                return
        call()

    def finish(self, error: Exception | None) -> None:
        self.error = None if error is None else fresh(as_torch_error(error))
        assert self.in_cpp is not None
        # Before `over`: the half in C++ gives a future without value one when `wait` returns.
        self.in_cpp.set_result(self.results if self.error is None else _Failure(self.error))
        with self._lock:
            self.over.set()
            future, calls = self._future, self._at_end
            self._at_end = []
        for call in calls:
            call()
        if future is not None:
            # A callback may start another collective and wait for it, which needs this thread.
            callbacks.run(lambda: future.set_result(None))

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = timeout.total_seconds() if timeout is not None else 0.0
        if not self.over.wait(limit if limit > 0 else None):
            late = Timeout.because("wait", f"the collective is not over after {limit} s")
            raise as_torch_error(late)
        if self.error is not None:
            raise fresh(self.error)
        return True

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.over.is_set():
                    self._future.set_result(None)
            future = self._future

        # C++ sees only an error that a callback raises. `set_exception` makes the error a value,
        # which DDP's reducer takes for tensors.
        def outcome(_: Any) -> list[torch.Tensor]:
            if self.error is not None:
                raise fresh(self.error)
            return self.results

        return future.then(outcome)


@all_untraced
class Work(_c10d.PythonCallbackWork):  # type: ignore[misc]  # torch is not typed
    """A collective under way. *any thread*

    The half in C++ keeps all that it needs: torch may hold it longer, as in DDP's `join`.
    """

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        outcome = _Outcome(results)
        super().__init__(outcome.wait)
        outcome.in_cpp = super().get_future()
        self._outcome = outcome

    def finish(self, error: Exception | None) -> None:
        """Ends it. Called once. An error becomes one that torch's users catch."""
        self._outcome.finish(error)

    def at_end(self, call: Callable[[], None]) -> None:
        """Calls `call` on the thread that ends the collective, or here if it has ended."""
        self._outcome.at_end(call)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._outcome.wait(timeout)

    def is_completed(self) -> bool:
        return self._outcome.over.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._outcome.error is None

    def exception(self) -> Exception | None:
        return self._outcome.error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outcome.results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._outcome.future()


# Other backends' names in profiles, where they are not those of the methods.
_PROFILED = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "all_to_all_single": "all_to_all",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
}


def profile(work: Work, func: str, inputs: Sequence[torch.Tensor]) -> None:
    """Shows `work` to torch's profiler, if that is on: from now to the work's end."""
    if not torch._C._autograd._profiler_enabled():
        return
    name = func.partition(" ")[0]
    name = f"pccl:{_PROFILED.get(name, name)}"
    record: Any = torch._C._profiler._RecordFunctionFast(name, list(inputs))
    record.__enter__()
    work.at_end(lambda: record.__exit__(None, None, None))


# Some C++ code, as DDP's built-in fp16 hook, needs a future of a list of tensors, not of a Python
# object. TorchScript makes one that is typed and not over; Python cannot.
@functools.cache
def _typed() -> Any:
    return torch.jit.CompilationUnit("""
def awaited(done: Future[bool], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def typed(done: Future[bool], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(awaited, done, tensors)
""").typed


@all_untraced
class TypedWork(_c10d.Work):  # type: ignore[misc]  # torch is not typed
    """`work` for a caller in C++ that takes the future's value for a list of tensors. *any thread*

    Its half in C++ asks this object to wait, and for the future. C++ keeps this object where the
    collective was called from C++, and not where Python gives a work to C++: `Work` is for that.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Exception | None:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.synchronize()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        made: torch.futures.Future[list[torch.Tensor]] = _typed()(
            self._work.get_future(), self._work.result()
        )
        return made


class _Callbacks:
    """Runs callbacks of futures apart from the threads that make progress. *any thread*

    A callback may wait for another's collective, so a new thread starts if none is idle.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """For a forked child, which has none of the threads."""
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._running = 0
        self._idle = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self, job: Callable[[], None]) -> None:
        with self._lock:
            self._running += 1
            if self._idle:
                self._idle -= 1
                self._jobs.put(job)
                return
        thread = threading.Thread(target=self._work, args=(job,), name="pccl callback", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            # Here it can wait for no other collective, but without it the future would never end.
            try:
                job()
            finally:
                self._end(idle=False)

    def wait(self, seconds: float) -> None:
        """Waits until no callback runs, at most that long.

        The interpreter ends daemon threads where they ask for the GIL. Inside a callback that is in
        torch's C++, which aborts the process then.
        """
        with self._ended:
            self._ended.wait_for(lambda: self._running == 0, seconds)

    def _end(self, *, idle: bool) -> None:
        with self._ended:
            self._running -= 1
            self._idle += idle
            self._ended.notify_all()

    def _work(self, job: Callable[[], None] | None) -> None:
        while job is not None:
            try:
                job()
            except BaseException:
                self._end(idle=False)
                raise
            job = None  # lets its tensors go
            self._end(idle=True)
            try:
                job = self._jobs.get(timeout=_IDLE)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._idle -= 1
                        return
                job = self._jobs.get()  # given just now


callbacks = _Callbacks()
os.register_at_fork(after_in_child=callbacks.forget)


def start_thread(
    target: Callable[[], None], name: str, func: str, purpose: str
) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise InvalidUsage.because(func, f"no thread for {purpose}: {error}") from error
    return thread


def await_end(thread: threading.Thread) -> None:
    # The interpreter cuts off threads that outlive it. Inside of torch's C++ that is an abort.
    if thread is not threading.current_thread():
        thread.join(_ENDING)


class Queue:
    """Runs a group's jobs in the order in which they were given. *any thread*"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held while a job runs
        self._unfinished = 0
        self._closed = False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, job: Callable[[], None], func: str, *, here: bool) -> None:
        """Runs `job` after all earlier ones: here if `here` and none is left, else on a thread.

        Raises:
            InvalidUsage: It was closed, or there is no thread for it. `job` will not run.
        """
        with self._lock:
            if self._closed:
                raise InvalidUsage.because(func, DESTROYED)
            here = here and self._unfinished == 0
            if not here and self._thread is None:
                self._thread = start_thread(self._work, self._name, func, "collectives")
            self._unfinished += 1
            if not here:
                self._jobs.put(job)
                return
            self._turn.acquire()
        try:
            job()
        finally:
            self._turn.release()
            with self._lock:
                self._unfinished -= 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            with self._turn:
                job()
            del job  # lets its tensors go
            with self._lock:
                self._unfinished -= 1

    def close(self) -> None:
        """Ends its thread after the jobs given so far, and waits for that."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            await_end(thread)
