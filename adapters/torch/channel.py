"""A channel: messages between two ranks of a c10d group.

Two ranks that exchange messages have a pccl group of their own, a *channel*, founded by the first
message. A channel is two streams, one for each direction. A stream is a sequence of broadcasts in
the group of two. A message is a *frame* of fixed size, followed by the rest if it does not fit. The
frame has tag, length and the first bytes, so the bytes travel once and their number need not be
known before.

Each end of a stream has one thread, started by the first message. The sender takes messages in
order. The receiver reads the stream while some receive could take a message from it. It keeps
messages with other tags until a receive asks for them.

A frame waits for its reader in short steps, each of which ends in a `Timeout` on both ends. So an
end may stop waiting at any time and leave no operation behind, and the master never sees a member
wait so long that it would call it a straggler or stuck.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from pccl.adapters.torch.mailbox import Letter, Mailbox, error_of, is_late, too_large, too_late
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.tensor_bytes import Bytes
from pccl.adapters.torch.work import await_end, start_thread
from pccl.collectives import Kind
from pccl.errors import (
    Deadlock,
    InvalidUsage,
    MasterLost,
    PCCLError,
    PeerLost,
    Timeout,
    TooFewPeers,
)
from pccl.types import DataType, ReduceOp

_HEADER = struct.Struct("<IIqQ")  # kind, zero, tag, bytes of the message
_FRAME = 4096  # bytes: an operation of this size takes as long as one of a few bytes
_STEP = 0.9  # seconds; the engine reports a member as blocked after one


def _without_frames(error: PCCLError) -> PCCLError:
    """Drops the frames of this thread, which would keep tensors alive, for another thread."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class Channel:
    """Messages between this rank and another one. *any thread*

    Args:
        other: The other rank.
        name: Of its threads.
        make: Makes this process's member of the group of two, to be founded within some seconds.
        mailbox: Where received messages go.
        gone: The error of a rank that has left the c10d group or was lost; None if it is there.
        on_lost: Called once, when this channel ends.
    """

    def __init__(
        self,
        other: int,
        name: str,
        is_lower: bool,
        make: Callable[[float], Member],
        mailbox: Mailbox,
        gone: Callable[[int, str], PCCLError | None],
        on_lost: Callable[[int, PCCLError], None],
    ) -> None:
        self.other = other
        self._is_lower = is_lower
        self._make = make
        self._mailbox = mailbox
        self._gone = gone
        self._on_lost = on_lost
        self._name = name
        self._founding = threading.Lock()  # held while one thread founds the group of two
        self._lock = threading.Lock()  # guards what follows
        self._member: Member | None = None
        self._joined = False
        self.lost: PCCLError | None = None  # why there will be no messages any more
        self._queue: deque[Letter] = deque()
        self._queued = threading.Condition(self._lock)
        self._sending: Letter | None = None
        self._threads: dict[str, threading.Thread] = {}

    # Asked by callers.

    def start(self, func: str) -> None:
        """Starts the thread for `func`, "send" or "recv", if there is none."""
        with self._lock:
            if self.lost is not None:
                raise error_of(func, self.lost)
            if func in self._threads:
                return
            target = self._send if func == "send" else self._receive
            purpose = f"messages with rank {self.other}"
            self._threads[func] = start_thread(target, f"{self._name} {func}", func, purpose)

    def send(self, letter: Letter) -> None:
        self.start("send")
        with self._lock:
            if self.lost is None:
                self._queue.append(letter)
                self._queued.notify()
                return
            lost = self.lost
        letter.done(error_of("send", lost))

    def cancel(self, letters: Sequence[Letter]) -> list[Letter]:
        """Removes and returns those of these sends that have not begun."""
        with self._lock:
            found = [letter for letter in self._queue if letter in letters]
            for letter in found:
                self._queue.remove(letter)
        return found

    def expire(self) -> None:
        """Ends the sends that have not begun and whose deadline has passed."""
        with self._lock:
            queued = list(self._queue)
        for letter in self.cancel([letter for letter in queued if is_late(letter)]):
            letter.done(too_late("send", letter))

    def waiting(self) -> str | None:
        """The function that waits for the other rank, "send" or "recv"; None if neither does."""
        with self._lock:
            if self.lost is not None:
                return None
            if self._queue or self._sending is not None:
                return "send"
        return "recv" if self._mailbox.waits_for(self.other) else None

    def is_founded(self) -> bool:
        with self._lock:
            return self._joined

    def lose(self, error: PCCLError) -> None:
        """Ends all present and later messages with `error`."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = error
            member = self._member
            queued = list(self._queue)
            self._queue.clear()
            self._queued.notify_all()
        for letter in queued:
            letter.done(error_of("send", error))
        if member is not None:
            member.leave()
        self._on_lost(self.other, error)

    def close(self) -> None:
        """Waits for its threads. REQUIRES: `lose` was called."""
        with self._lock:
            member = self._member
            threads = list(self._threads.values())
        if member is not None:
            member.close()
        for thread in threads:
            await_end(thread)

    # The group of two.

    def _found(self, timeout: float) -> Member:
        with self._founding:
            with self._lock:
                if self.lost is not None:
                    raise self.lost
                if self._joined:
                    assert self._member is not None
                    return self._member
            member = self._make(timeout)
            with self._lock:
                if (lost := self._why_lost()) is not None:
                    raise lost
                self._member = member
            try:
                member.join()
            except BaseException:
                with self._lock:
                    self._member = None  # the next message tries again
                raise
            with self._lock:
                self._joined = True
                lost = self._why_lost()
            if lost is None:
                return member
        member.leave()
        raise lost

    def _why_lost(self) -> PCCLError | None:
        return self.lost  # a call, since the type checker does not know that another thread sets it

    def _move(self, data: Bytes, sends: bool, limit: float) -> None:
        """One operation of a stream. Both ends see the same outcome."""
        member = self._member
        assert member is not None
        lower_sends = sends == self._is_lower
        operation = member.comm._joined("send" if sends else "recv").start(
            [(data, data, int(DataType.UINT8))],
            op=int(ReduceOp.SUM),
            tag=int(lower_sends),
            level=1,
            any_thread=True,
            rerun=False,
            structure=b"message",
            description="a message",
            timeout=limit,
            kind=int(Kind.BROADCAST),
            root=member.order[0 if lower_sends else 1],
            parts=2,
        )
        if operation.wait(limit).world_size != 2:
            raise PeerLost.because("send" if sends else "recv", "the other rank is gone")

    def _judge(self, func: str, error: Exception) -> PCCLError:
        """The error to report for one that ends this channel."""
        if self.lost is not None:
            return error_of(func, self.lost)
        gone = self._gone(self.other, func)
        if gone is not None:
            return gone
        member = self._member
        # The lower rank runs the channel's master, unless there is one outside.
        with_master = member is not None and member.master_inside and not self._is_lower
        lost = PeerLost | TooFewPeers | MasterLost if with_master else PeerLost | TooFewPeers
        if isinstance(error, lost):
            return PeerLost.because(func, f"rank {self.other} is gone")
        if isinstance(error, PCCLError):
            return error
        return InvalidUsage.because(func, f"{type(error).__name__}: {error}")

    # The sending thread.

    def _send(self) -> None:
        while True:
            with self._lock:
                while not self._queue and self.lost is None:
                    self._queued.wait()
                if self.lost is not None:
                    return
                left = self._queue[0].deadline.left() or 0.0
            try:
                # The message stays in the queue: this may take longer than its timeout.
                self._found(left)
            except (Timeout, Deadlock):
                self.expire()
                continue
            except Exception as error:
                self.lose(_without_frames(self._judge("send", error)))
                return
            with self._lock:
                if not self._queue:
                    continue
                letter = self._sending = self._queue.popleft()
            outcome = self._try_to_send(letter)
            with self._lock:
                self._sending = None
            letter.done(outcome)
            del letter, outcome  # lets its tensor go

    def _try_to_send(self, letter: Letter) -> PCCLError | None:
        try:
            self._send_one(letter)
        except Timeout as late:
            return _without_frames(late)
        except Exception as error:
            lost = _without_frames(self._judge("send", error))
            self.lose(lost)
            return lost
        return None

    def _send_one(self, letter: Letter) -> None:
        frame = np.zeros(_FRAME, np.uint8)
        header = _HEADER.pack(letter.kind, 0, letter.tag, letter.data.size)
        frame[: len(header)] = np.frombuffer(header, np.uint8)
        short = letter.data.size <= _FRAME - _HEADER.size
        if short:
            frame[_HEADER.size : _HEADER.size + letter.data.size] = letter.data
        while True:
            left = letter.deadline.left() or 0.0
            if left == 0:
                raise too_late("send", letter)
            try:
                self._move(frame, True, min(_STEP, left))
                break
            except (Timeout, Deadlock):
                continue
        if not short:
            try:
                self._move(letter.data, True, letter.timeout)
            except (Timeout, Deadlock):
                raise too_late("send", letter) from None

    # The receiving thread.

    def _receive(self) -> None:
        while True:
            with self._mailbox.changed:
                while not (wanted := self._mailbox.wanted_from(self.other)):
                    if self.lost is not None:
                        return
                    self._mailbox.changed.wait()
                left = min(letter.deadline.left() or 0.0 for letter in wanted)
                limit = wanted[0].timeout
                del wanted
            if self.lost is not None:
                return
            try:
                if left > 0:
                    self._found(left)
                    self._receive_one(min(_STEP, left), limit)
            except (Timeout, Deadlock):
                self._mailbox.expire()
            except Exception as error:
                self.lose(_without_frames(self._judge("recv", error)))
                return
            else:
                if left == 0:
                    self._mailbox.expire()

    def _receive_one(self, step: float, limit: float) -> None:
        frame = np.empty(_FRAME, np.uint8)
        self._move(frame, False, step)
        kind, _, tag, size = _HEADER.unpack(frame[: _HEADER.size].tobytes())
        if size <= _FRAME - _HEADER.size:
            data = frame[_HEADER.size : _HEADER.size + size]
            self._mailbox.deliver(self.other, kind, tag, data)
            return
        letter = self._mailbox.claim(self.other, kind, tag)
        if letter is not None and letter.data.size >= size:
            try:
                self._move(letter.data[:size], False, limit)
            except (Timeout, Deadlock):
                letter.done(too_late("recv", letter))
                return
            except Exception as error:
                letter.done(_without_frames(error_of("recv", self._judge("recv", error))))
                raise
            letter.peer, letter.size = self.other, size
            letter.done(None)
            return
        if letter is not None:
            letter.done(too_large(self.other, size, letter.data.size))
        data = np.empty(size, np.uint8)
        self._move(data, False, limit)
        if letter is None:
            self._mailbox.deliver(self.other, kind, tag, data)
