"""What `pccl run` writes, on threads: an output whose reader pauses holds up no signal."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

__all__ = ["Outputs"]


class _Block(NamedTuple):
    """Bytes for a file, and who is told when they are written, or lost."""

    to: int
    data: bytes
    written: asyncio.Future[None]


class Outputs:
    """Files that are written in the order given, while no event loop waits for their readers.

    A thread for each file, and one for two descriptors of the same: lines stay whole. Lives in one
    event loop. A file that fails is replaced by nothing, and `failed` is called in the loop.
    """

    def __init__(self, failed: Callable[[OSError], None]) -> None:
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        # By device and inode.
        self._queues: dict[tuple[int, int], queue.SimpleQueue[_Block | None]] = {}
        self._of: dict[int, queue.SimpleQueue[_Block | None]] = {}

    def write(self, to: int, data: bytes) -> asyncio.Future[None]:
        """Has the bytes written, soon.

        Args:
            to: The descriptor.
            data: Whole lines.

        Returns:
            A future that is done when they are written, or lost. Nobody needs to wait for it.
        """
        written = self._loop.create_future()
        self._queue(to).put(_Block(to, data, written))
        return written

    def written(self) -> list[asyncio.Future[None]]:
        """Futures that are done when everything so far is written, or lost."""
        return [self.write(to, b"") for to in self._of]

    def close(self) -> None:
        """Ends each thread after its last write. One whose reader pauses may outlive the loop."""
        for each in self._queues.values():
            each.put(None)

    def _queue(self, to: int) -> queue.SimpleQueue[_Block | None]:
        if to not in self._of:
            key = _file(to)
            if key not in self._queues:
                self._queues[key] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(self._queues[key],), daemon=True).start()
            self._of[to] = self._queues[key]
        return self._of[to]

    def _work(self, blocks: queue.SimpleQueue[_Block | None]) -> None:
        while (block := blocks.get()) is not None:
            try:
                _write(block.to, block.data)
            except OSError as error:  # e.g. the reader was `head`
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, block.to)
                os.close(nowhere)
                self._tell(self._failed, error)
            self._tell(_done, block.written)

    def _tell(self, function: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, value)


def _file(descriptor: int) -> tuple[int, int]:
    """The device and inode; of a descriptor that is none, its number."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return -1, descriptor
    return status.st_dev, status.st_ino


def _done(written: asyncio.Future[None]) -> None:
    if not written.done():  # nobody waits any more
        written.set_result(None)


def _write(to: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        with suppress(BlockingIOError):
            left = left[os.write(to, left) :]
            continue
        # Another program has made the terminal or the pipe so, and its reader is slow.
        ready = select.poll()
        ready.register(to, select.POLLOUT)
        ready.poll()
