"""An operation under way, and what it knows about itself afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pccl import _settings
from pccl.errors import InvalidUsage
from pccl.types import ReduceInfo

if TYPE_CHECKING:
    from pccl import _core
    from pccl.peer import Peer
    from pccl.reduce.weighted import WeightedMean

_Result = TypeVar("_Result", covariant=True)


def reduce_info(info: _core.ReduceInfo, mean: WeightedMean | None = None) -> ReduceInfo:
    """The engine's account of an operation, as a plain value. `mean`: the weighted mean it made."""
    made = object.__new__(ReduceInfo)
    # Not by the constructor: that of a frozen dataclass takes as long as a small reduction.
    made.__dict__.update(
        local_world_size=info.world_size,
        tx_bytes=info.tx_bytes,
        rx_bytes=info.rx_bytes,
        contributors=tuple(info.contributors),
        epoch=info.epoch,
        attempts=info.attempts,
        bytes=info.bytes,
        seconds=info.seconds,
        waiting_seconds=info.waiting_seconds,
        moving_seconds=info.moving_seconds,
        total_weight=None if mean is None else mean.total,
    )
    return made


def total(infos: Sequence[ReduceInfo], attempts: int) -> ReduceInfo:
    """One account of several operations: the last one's members, the bytes and times of all."""
    return ReduceInfo(
        local_world_size=infos[-1].local_world_size,
        tx_bytes=sum(info.tx_bytes for info in infos),
        rx_bytes=sum(info.rx_bytes for info in infos),
        contributors=infos[-1].contributors,
        epoch=infos[-1].epoch,
        attempts=attempts,
        bytes=sum(info.bytes for info in infos),
        seconds=sum(info.seconds for info in infos),
        waiting_seconds=sum(info.waiting_seconds for info in infos),
        moving_seconds=sum(info.moving_seconds for info in infos),
        total_weight=infos[-1].total_weight,
    )


class Work(Generic[_Result]):
    """An `allreduce_async` or `allgather_async` in flight.

    Dropping it is safe: it runs to its end and keeps its arrays until then. Awaitable: `await work`
    waits in a thread of its own, and makes results on a device in the loop's. An `out=` array that
    is not contiguous, is on an accelerator, gets a weighted mean, or is beside the sum or product
    of an int, is filled when somebody waits.
    """

    def __init__(
        self,
        comm: Peer,
        operation: _core.Operation,
        result: Callable[[], _Result],
        mean: WeightedMean | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self._comm = comm
        self._on_device = on_device  # the result, or a part of it
        self._mean = mean  # what `result` computes
        # Guards what follows; held while a result is made, never while waiting.
        self._lock = threading.Lock()
        self._operation: _core.Operation | None = operation
        self._make: Callable[[], Any] | None = result  # until made
        self._result: Any = None
        self._info: ReduceInfo | None = None

    def wait(self, timeout: float | None = None) -> _Result:
        """Waits for the result. May be called again, from any thread: returns the same object.

        Args:
            timeout: Seconds. Default: PCCL_TIMEOUT, else no limit. When it passes, the operation
                ends with `Timeout` on all members, as any call does; to look without waiting, use
                `done`.

        Returns:
            `out` if it was given; else a tree like the input's.

        Raises:
            PCCLError: As `allreduce`.
        """
        return self._wait(_settings.seconds(timeout, "Work.wait"))

    def _wait(self, timeout: float | None, func: str = "Work.wait") -> _Result:
        info = self._over(timeout, func)
        if info is not None:
            with self._lock:
                if self._make is not None:
                    self._result = self._make()
                    self._info = reduce_info(info, self._mean)
                    self._make = self._mean = self._operation = None  # lets the inputs go
        result: _Result = self._result
        return result

    def _over(self, timeout: float | None, func: str) -> _core.ReduceInfo | None:
        """Waits for the operation; None once the result is made."""
        operation = self._operation
        if operation is None:
            return None
        if self._comm._is_forked():
            sentence = "this process was forked; its copy of the operation cannot be waited for"
            raise InvalidUsage.because(func, sentence)
        return operation.wait(timeout)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, without waiting for others."""
        operation = self._operation
        return operation is None or operation.done()

    @property
    def info(self) -> ReduceInfo:
        """How the operation went.

        Raises:
            InvalidUsage: It is not finished.
            PCCLError: It failed.
        """
        if not self.done():
            raise InvalidUsage.because("Work.info", "the operation is not finished; wait() first")
        self._wait(None)
        assert self._info is not None
        return self._info

    def __await__(self) -> Generator[Any, None, _Result]:
        # A thread of its own: a loop waits at its end for those of its executor, despite Ctrl-C.
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        # On a device a copy follows only the work of the thread that makes it. So the result is
        # made in the loop's thread there.
        make_here = self._on_device

        def tell(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if make_here and error is None:
                try:
                    result = self.wait()
                except BaseException as caught:
                    error = caught.with_traceback(None)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def wait() -> None:
            result, error = None, None
            try:
                result = (
                    self._over(_settings.seconds(None, "Work.wait"), "Work.wait")
                    if make_here
                    else self.wait()
                )
            except BaseException as caught:
                # Its traceback has this call, and so the future that will hold it, in a cycle.
                error = caught.with_traceback(None)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, result, error)

        threading.Thread(target=wait, name="pccl await", daemon=True).start()
        return future.__await__()
