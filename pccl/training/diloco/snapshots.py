"""A copy of the shared state, and its way to a newcomer while the run goes on.

A newcomer and each of its holders are a pccl group of two, a *line*. The newcomer asks, and the
holder answers, both by broadcasts. Several holders send different pieces of the same snapshot; the
piece of one that is lost is asked of another.

| request | first | length | answer |
|---|---|---|---|
| STEPS | the step that the newcomer waits for | 0 | nothing, at that step or after half a second |
| MANIFEST | 0 | 0 | what the snapshot consists of, as JSON |
| PIECE | the piece's first byte | its bytes | the piece, or its beginning |
| END | 0 | 0 | none: both leave |

Before each answer comes a header: the holder's inner step, and the answer's length.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.following.pair import Pair
from pccl.following.snapshot import Snapshot, listed
from pccl.frameworks import Array
from pccl.training.diloco.options import FUNC, refused

_STEPS, _MANIFEST, _PIECE, _END = range(4)
_PIECE_BYTES = 1 << 20
_ASK_SECONDS = 0.5  # after which a holder answers although nothing is new
# Shares of its time that a holder sends to a newcomer, while no reduction is in flight here and
# while one is.
_SHARE, _SHARE_BESIDE = 0.8, 0.25
_MOST_REST = 5.0  # seconds; the engine warns of a call that waits for longer than ten
_BURST_SECONDS = 0.25  # at the bound of the rate: the most that is sent at once
_LITTLE = 64 << 10  # bytes that a holder sends after it has waited in a step for so long
# For a message, whatever PCCL_TIMEOUT says of the program's own calls: a holder rests between
# pieces, and a link may be slow. One that is lost ends the message much earlier.
_MESSAGE_SECONDS = 600.0
_DECLINE_SECONDS = 5.0  # that a holder which has no thread waits for the newcomer, to decline
_MOST_MANIFEST = 64 << 20  # bytes

_log = logging.getLogger(__name__)


class Progress:
    """How far this member is, for those that follow it. *any thread*

    While this member waits for others in a step, little is sent to newcomers: what it waits for
    may need the same links. A reduction in the background of inner steps may take longer.

    Args:
        reduces: Whether a reduction of this member is in flight.
        most_megabits: That all holders of this member send together, in Mbit/s.
    """

    def __init__(self, reduces: Callable[[], bool], most_megabits: float | None = None) -> None:
        self._reduces = reduces
        self._rate = None if most_megabits is None else most_megabits * 1e6 / 8  # bytes a second
        self._free = 0.0  # when what was sent has passed at that rate
        self._changed = threading.Condition()
        self._steps = 0
        self._waits = False

    @contextmanager
    def calling(self, steps: int) -> Iterator[None]:
        """This member makes the calls of that step."""
        self._tell(steps, True)
        try:
            yield
        finally:
            self._tell(steps, False)

    def _tell(self, steps: int, waits: bool) -> None:
        with self._changed:
            self._steps, self._waits = steps, waits
            self._changed.notify_all()

    def at(self, step: int) -> int:
        """The present step, at the latest after a while; at once if it is `step` or later."""
        with self._changed:
            self._changed.wait_for(lambda: self._steps >= step, _ASK_SECONDS)
            return self._steps

    def room(self, length: int) -> int:
        """How many bytes of so many to send now. Waits for the end of a step."""
        if self._rate is not None:
            length = min(length, max(1, int(self._rate * _BURST_SECONDS)))
        with self._changed:
            if self._changed.wait_for(lambda: not self._waits, _MOST_REST):
                return length
        return min(length, _LITTLE)

    def rest(self, sent: int, taken: float) -> float:
        """Seconds to rest after a piece of so many bytes that it took so many seconds to send."""
        share = _SHARE_BESIDE if self._reduces() else _SHARE
        rests = min(_MOST_REST, taken * (1 / share - 1))
        if self._rate is None:
            return rests
        with self._changed:
            now = time.monotonic()
            self._free = max(self._free, now - taken) + sent / self._rate
            return max(rests, self._free - now)


class Line(Pair):
    """One of the two ends of a line.

    Args:
        comm: This process's member of the run.
        group: The line's group.
    """

    def __init__(self, comm: Communicator, group: int) -> None:
        self._run = comm
        super().__init__(comm._companion(group), FUNC, timeout=_MESSAGE_SECONDS)

    @property
    def belongs(self) -> bool:
        """Whether this process is still a member of the run."""
        return self._run._is_connected()


class Holder:
    """Sends a snapshot to one newcomer, on a thread of its own, until that has enough.

    Attributes:
        newcomer: Its id.
    """

    def __init__(self, newcomer: str, line: Line, snapshot: Snapshot, progress: Progress) -> None:
        self.newcomer = newcomer
        self._line = line
        self._progress = progress
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(snapshot,), name="pccl snapshot", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread left: others may send it
            _log.warning("a newcomer gets nothing of the state from here: %s", error)
            with suppress(PCCLError):
                line.join(_DECLINE_SECONDS)  # so that it learns of the end, and asks others
            line.close()

    @property
    def over(self) -> bool:
        """Whether the newcomer needs no more, or is gone."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Leaves the newcomer to the other holders."""
        self._closed.set()
        self._line.close()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._line.join()
            while self._answer(snapshot):
                pass
        except PCCLError as error:
            if not self._closed.is_set():
                _log.debug("a newcomer takes no more of the state from here: %s", error)
        finally:
            self._line.close()

    def _answer(self, snapshot: Snapshot) -> bool:
        request = np.zeros(3, np.int64)
        self._line.receive(request)
        what, first, length = request.tolist()
        if what == _END or not self._line.belongs:
            return False
        steps = self._progress.at(first if what == _STEPS else 0)
        if what == _PIECE:
            if not (0 <= first < snapshot.size and 0 < length <= _PIECE_BYTES):
                raise refused(f"a newcomer asks for {length} bytes at {first} of {snapshot.size}")
            length = min(length, snapshot.size - first)
            answer = snapshot.read(first, self._progress.room(length))
        else:
            answer = snapshot.manifest if what == _MANIFEST else np.empty(0, np.uint8)
        began = time.monotonic()
        self._line.send(np.array([steps, answer.size], np.int64))
        if answer.size:
            self._line.send(answer)
        if what == _PIECE:
            self._closed.wait(self._progress.rest(answer.size, time.monotonic() - began))
        return True


class Fetch:
    """Receives a snapshot from several holders, on threads of their own.

    One line, the guide, is for steps alone while there are others: answers with pieces may come
    late, and the members wait for a newcomer that learns late that they reduce.

    Args:
        lines: To the holders. They are closed here.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._open = len(lines)
        self._joined = 0  # lines whose other end has come
        self._guide: Line | None = None
        self._awaited = 0  # the step that the newcomer waits for
        self._closed = False
        self._steps = 0  # the latest that a holder has told
        self._manifest: Array | None = None
        self._data = np.empty(0, np.uint8)
        self._left: deque[tuple[int, int]] = deque()  # pieces that are not asked for
        self._missing = -1  # bytes; -1: not known yet
        for line in lines:
            thread = threading.Thread(
                target=self._run, args=(line,), name="pccl fetch", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                _log.warning("a holder of the state is not asked: %s", error)
                line.close()
                with self._changed:
                    self._open -= 1

    @property
    def complete(self) -> bool:
        return self._missing == 0

    @property
    def failed(self) -> bool:
        """Whether no holder is left, and something is missing."""
        return self._open == 0 and not self.complete

    def wait(self, step: int | None = None) -> None:
        """Returns when all of it is there or no holder is left, or a holder has made that step."""

        def over() -> bool:
            reached = step is not None and self._steps >= step
            return reached or self._open == 0 or self.complete

        with self._changed:
            self._awaited = step or 0
            while not self._changed.wait_for(over, 0.5):  # in turns, for Ctrl-C
                pass

    def follow(self, step: int) -> None:
        """Returns when a holder has made that step, or none is left."""
        with self._changed:
            self._awaited = step
            while not self._changed.wait_for(lambda: self._steps >= step or self._open == 0, 0.5):
                pass

    def take(self) -> tuple[Array, Array]:
        """The manifest and the bytes. The lines go on to tell of steps. REQUIRES: complete."""
        assert self._manifest is not None
        taken = self._manifest, self._data
        self._data = np.empty(0, np.uint8)
        return taken

    def end(self) -> None:
        """Gives up what is missing. Lines end after the answer that they wait for."""
        with self._changed:
            self._closed = True

    def _run(self, line: Line) -> None:
        joined = 0
        try:
            line.join()
            with self._changed:
                joined = 1
                self._joined += 1
            while not self._closed:
                self._ask(line)
            line.send(np.array([_END, 0, 0], np.int64))
        except PCCLError as error:
            if not self._closed:
                _log.debug("a holder sends no more of the state: %s", error)
        finally:
            line.close()
            with self._changed:
                self._open -= 1
                self._joined -= joined
                if self._guide is line:
                    self._guide = None
                self._changed.notify_all()

    def _ask(self, line: Line) -> None:
        with self._changed:
            self._guide = self._guide or line
            guides = self._guide is line and self._joined > 1
            piece = self._left.popleft() if self._left and not guides else None
            awaited = max(self._awaited, self._steps + 1)
        if self._manifest is None and not guides:
            self._begin(self._call(line, _MANIFEST, 0, 0))
        elif piece is None:
            self._call(line, _STEPS, awaited, 0)
        else:
            self._receive(line, *piece)

    def _receive(self, line: Line, first: int, length: int) -> None:
        received = 0
        try:
            received = self._call(line, _PIECE, first, length).size
        finally:
            with self._changed:
                self._missing -= received
                if received < length:
                    self._left.append((first + received, length - received))
                self._changed.notify_all()

    def _call(self, line: Line, what: int, first: int, length: int) -> Array:
        """Asks, and returns the answer. A piece is in its place then."""
        line.send(np.array([what, first, length], np.int64))
        header = np.zeros(2, np.int64)
        line.receive(header)
        steps, size = header.tolist()
        if not 0 <= size <= (length if what == _PIECE else _MOST_MANIFEST):
            raise refused(f"a holder answers with {size} bytes")
        piece = self._data[first : first + size]
        answer = piece if what == _PIECE else np.empty(size, np.uint8)
        if answer.size:
            line.receive(answer)
        with self._changed:
            self._steps = max(self._steps, steps)
            self._changed.notify_all()
        return answer

    def _begin(self, manifest: Array) -> None:
        with self._changed:
            if self._manifest is not None:
                return
            size = sum(entry[4] for entry in listed(manifest))
            self._data = np.empty(size, np.uint8)
            starts = range(0, size, _PIECE_BYTES)
            self._left.extend((first, min(_PIECE_BYTES, size - first)) for first in starts)
            self._missing = size
            self._manifest = manifest
            self._changed.notify_all()
