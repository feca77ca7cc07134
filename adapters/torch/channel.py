"""Messages between two ranks of a c10d group.

Every pair of ranks that exchanges messages has a pccl group of its own, a *channel*, founded by its first
message. A channel is two streams, one for each direction, and a stream is a sequence of broadcasts in
the group of two. A message is a *frame* of fixed size, which says tag and length and holds a short
message whole, and then the rest, if there is one. So the receiver learns the length from the message,
and the bytes travel once.

Each end of a stream has one thread, started by the first message. The sending one takes messages in
their order. The receiving one reads the stream while some receive could take a message from it; messages
with other tags are kept until a receive asks for them.

A frame waits for its reader in short steps: each ends in a `Timeout` that both ends see alike, and is
followed by another one. An end may therefore stop waiting at any time without an operation that stays
behind, and the master never sees a member that waits long, which it would call a straggler or stuck.
"""

from __future__ import annotations

import copy
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from pccl import _settings
from pccl.adapters.torch.errors import as_torch_error
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.tensor_bytes import Bytes
from pccl.adapters.torch.work import DESTROYED, Work, await_end
from pccl.collectives import Kind
from pccl.errors import (
    Deadlock,
    InvalidArgument,
    InvalidUsage,
    MasterLost,
    PCCLError,
    PeerLost,
    Timeout,
    TooFewPeers,
)
from pccl.types import DataType, ReduceOp

# Two kinds of messages, whose tags have nothing to do with each other.
USER = 0
COLLECTIVE = 1

_HEADER = struct.Struct("<IIqQ")  # kind, zero, tag, bytes of the message
_FRAME = 4096  # bytes: an operation of this size takes as long as one of a few bytes
_STEP = 0.9  # seconds; the engine reports a member as blocked after one
_GRACE = 1.0  # seconds that a channel has to deliver what a rank sent before it left
_WATCH = 0.1  # seconds between two looks at the members of the group


class Receipt(Work):
    """A message under way, and in the end from where it came."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__(results)
        self.source: Letter | None = None  # that is received

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        if self.source is None or self.source.peer is None:
            sentence = "no message has come" if self.source else "nothing is received here"
            raise as_torch_error(InvalidUsage.because("source_rank", sentence))
        return self.source.peer

    _source_rank = source_rank


@dataclass(eq=False)
class Letter:
    """A message to send, or the wish for one.

    Attributes:
        data: The bytes to send, or where received ones go: a shorter message fills only the first.
        kind: USER or COLLECTIVE.
        tag: 64 bits, signed.
        done: Called once, on any thread, with the error or None.
        timeout: Seconds for all of it.
        peer: The other rank. None receives from any, and is the sender's rank once it is known.
        size: Bytes of the message that was received.
    """

    data: Bytes
    kind: int
    tag: int
    done: Callable[[Exception | None], None]
    timeout: float
    peer: int | None
    size: int = 0
    deadline: _settings.Deadline = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = _settings.Deadline(self.timeout)

    def takes(self, peer: int, kind: int, tag: int) -> bool:
        return self.peer in (None, peer) and (self.kind, self.tag) == (kind, tag)

    def fill(self, peer: int, data: Bytes) -> None:
        """Receives `data`."""
        self.peer, self.size = peer, data.size
        if data.size > self.data.size:
            self.done(_too_large(peer, data.size, self.data.size))
            return
        self.data[: data.size] = data
        self.done(None)


def _too_large(peer: int, size: int, room: int) -> InvalidArgument:
    sentence = f"the message from rank {peer} has {size} bytes, the tensor {room}"
    return InvalidArgument.because("recv", sentence)


def _in(func: str, error: PCCLError) -> PCCLError:
    """The error as one of a function; each caller gets its own, with its own traceback."""
    made = copy.copy(error)
    made.func_name = func
    return made


def _without_frames(error: PCCLError) -> PCCLError:
    """For a caller on another thread: frames of this one would keep what it works with, as would a cycle."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _too_late(func: str, letter: Letter) -> Timeout:
    other = "any rank" if letter.peer is None else f"rank {letter.peer}"
    direction = "to" if func == "send" else "from"
    sentence = f"no message {direction} {other} with tag {letter.tag}"
    return Timeout.because(func, f"{sentence} within {letter.timeout:g} s")


@dataclass(eq=False)
class _Message:
    """One that came before it was asked for."""

    peer: int
    kind: int
    tag: int
    data: Bytes


class _Mailbox:
    """Receives that wait, and messages that nobody has asked for yet; of all channels. *any thread*"""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._letters: list[Letter] = []  # in the order of the calls
        self._early: list[_Message] = []  # in the order in which they came

    def post(self, letter: Letter) -> bool:
        """Fills a receive from what is here, else keeps it; returns whether it was filled."""
        with self.changed:
            for message in self._early:
                if letter.takes(message.peer, message.kind, message.tag):
                    self._early.remove(message)
                    break
            else:
                self._letters.append(letter)
                self.changed.notify_all()
                return False
        letter.fill(message.peer, message.data)
        return True

    def wanted_from(self, peer: int) -> list[Letter]:
        """The receives that a message of this rank could end. REQUIRES: `changed` is held."""
        return [letter for letter in self._letters if letter.peer in (None, peer)]

    def waits_for(self, peer: int) -> bool:
        with self.changed:
            return bool(self.wanted_from(peer))

    def claim(self, peer: int, kind: int, tag: int) -> Letter | None:
        """Takes out the receive that a message ends."""
        with self.changed:
            for letter in self._letters:
                if letter.takes(peer, kind, tag):
                    self._letters.remove(letter)
                    return letter
        return None

    def deliver(self, peer: int, kind: int, tag: int, data: Bytes) -> None:
        with self.changed:
            letter = self.claim(peer, kind, tag)
            if letter is None:
                self._early.append(_Message(peer, kind, tag, data))
                return
        letter.fill(peer, data)

    def cancel(self, letters: Sequence[Letter]) -> list[Letter]:
        """Takes out what is still here of these; returns it."""
        with self.changed:
            found = [letter for letter in self._letters if letter in letters]
            self._letters = [letter for letter in self._letters if letter not in letters]
        return found

    def drop_collectives_before(self, tag: int) -> None:
        """Forgets what failed collectives have left."""
        with self.changed:
            self._early = [
                message
                for message in self._early
                if message.kind != COLLECTIVE or message.tag >= tag
            ]

    def expire(self) -> None:
        """Ends the receives whose time is over."""
        with self.changed:
            late = [letter for letter in self._letters if letter.deadline.left() == 0]
            self.cancel(late)
        for letter in late:
            letter.done(_too_late("recv", letter))

    def fail(self, error: PCCLError, among: Callable[[Letter], bool]) -> None:
        with self.changed:
            failed = [letter for letter in self._letters if among(letter)]
            self.cancel(failed)
        for letter in failed:
            letter.done(_in("recv", error))


class _Channel:
    """Messages between this rank and another one. *any thread*"""

    def __init__(
        self, other: int, name: str, is_lower: bool, make: Callable[[float], Member], all: Messages
    ) -> None:
        self.other = other
        self._is_lower = is_lower
        self._make = make
        self._all = all
        self._mailbox = all.mailbox
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
        """Makes sure that there is a thread for `func`, "send" or "recv"."""
        with self._lock:
            if self.lost is not None:
                raise _in(func, self.lost)
            if func in self._threads:
                return
            target = self._send if func == "send" else self._receive
            thread = threading.Thread(target=target, name=f"{self._name} {func}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                sentence = f"no thread for messages with rank {self.other}: {error}"
                raise InvalidUsage.because(func, sentence) from error
            self._threads[func] = thread

    def send(self, letter: Letter) -> None:
        self.start("send")
        with self._lock:
            if self.lost is None:
                self._queue.append(letter)
                self._queued.notify()
                return
            lost = self.lost
        letter.done(_in("send", lost))

    def cancel(self, letters: Sequence[Letter]) -> list[Letter]:
        """Takes out what has not begun of these sends; returns it."""
        with self._lock:
            found = [letter for letter in self._queue if letter in letters]
            for letter in found:
                self._queue.remove(letter)
        return found

    def waiting(self) -> str | None:
        """What waits for the other rank, "send" or "recv"; None if nothing does."""
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
        """Ends what is under way, and all that comes later, with `error`."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = error
            member = self._member
            queued = list(self._queue)
            self._queue.clear()
            self._queued.notify_all()
        for letter in queued:
            letter.done(_in("send", error))
        if member is not None:
            member.leave()
        self._all.on_lost(self.other, error)

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
                member = self._member = self._make(timeout)
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
        return self.lost  # which another thread sets

    def _move(self, data: Bytes, sends: bool, limit: float) -> None:
        """One operation of a stream; both ends see the same outcome."""
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
        """What an error that ends this channel means."""
        if self.lost is not None:
            return _in(func, self.lost)
        gone = self._all.gone(self.other, func)
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
                raise _too_late("send", letter)
            try:
                self._found(left)
                self._move(frame, True, min(_STEP, left))
                break
            except (Timeout, Deadlock):
                continue
        if not short:
            try:
                self._move(letter.data, True, letter.timeout)
            except (Timeout, Deadlock):
                raise _too_late("send", letter) from None

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
                letter.done(_too_late("recv", letter))
                return
            except Exception as error:
                letter.done(_without_frames(_in("recv", self._judge("recv", error))))
                raise
            letter.peer, letter.size = self.other, size
            letter.done(None)
            return
        if letter is not None:
            letter.done(_too_large(self.other, size, letter.data.size))
        data = np.empty(size, np.uint8)
        self._move(data, False, limit)
        if letter is None:
            self._mailbox.deliver(self.other, kind, tag, data)


class Messages:
    """A group's messages. *any thread*

    Args:
        rank: This process's.
        size: Of the group.
        name: For the threads.
        make: Makes this process's member of the pccl group of it and another rank, to be founded within
            some seconds.
        gone: The error of a rank that has left the group or was lost, for a function; None if it is there.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        make: Callable[[int, float], Member],
        gone: Callable[[int, str], PCCLError | None],
    ) -> None:
        self.mailbox = _Mailbox()
        self._rank = rank
        self._size = size
        self._name = name
        self._make = make
        self.gone = gone
        self._lock = threading.Lock()  # guards what follows
        self._channels: dict[int, _Channel] = {}
        self._watcher: threading.Thread | None = None
        self._begun = threading.Event()  # something waits, perhaps
        self._closed = threading.Event()

    def send(self, letter: Letter) -> None:
        """Sends a message; `letter.done` tells the end.

        Raises:
            PCCLError: It cannot begin: the other rank is gone, or there is no thread for it.
        """
        assert letter.peer is not None
        self._ready(letter.peer, "send").send(letter)
        self._begun.set()

    def receive(self, letter: Letter) -> None:
        """Waits for a message; `letter.done` tells the end.

        Raises:
            PCCLError: As `send`, and from any rank if all others are gone.
        """
        if self.mailbox.post(letter):
            return
        try:
            self._prepare(letter)
        except PCCLError:
            if self.mailbox.cancel([letter]):
                raise  # else it was ended meanwhile
        self._begun.set()

    def _prepare(self, letter: Letter) -> None:
        if letter.peer is not None:
            self._ready(letter.peer, "recv")
            return
        errors = []
        for other in range(self._size):
            if other != self._rank:
                try:
                    self._ready(other, "recv")
                except PeerLost as error:
                    errors.append(error)
        if len(errors) == self._size - 1:
            sentence = "there is no other rank"
            raise errors[0] if errors else InvalidUsage.because("recv", sentence)

    def prepare(self, to: Sequence[int], by: Sequence[int]) -> None:
        """Starts what sends to these ranks and receives by those need.

        Raises:
            PCCLError: As `send`.
        """
        for other in to:
            self._ready(other, "send")
        for other in by:
            self._ready(other, "recv")

    def cancel(self, letters: Sequence[Letter]) -> list[Letter]:
        """Takes back what has not begun of these; returns it. `done` is not called for it."""
        with self._lock:
            channels = list(self._channels.values())
        found = self.mailbox.cancel(letters)
        for channel in channels:
            found += channel.cancel(letters)
        return found

    def _ready(self, other: int, func: str) -> _Channel:
        with self._lock:
            if self._closed.is_set():
                raise InvalidUsage.because(func, DESTROYED)
            if self._watcher is None:
                thread = threading.Thread(
                    target=self._watch, name=f"{self._name} watch", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as cause:
                    raise InvalidUsage.because(func, f"no thread for messages: {cause}") from cause
                self._watcher = thread
            channel = self._channels.get(other)
            if channel is None:
                lower, higher = sorted((self._rank, other))
                channel = self._channels[other] = _Channel(
                    other,
                    f"{self._name} {lower}-{higher}",
                    self._rank == lower,
                    lambda timeout: self._make(other, timeout),
                    self,
                )
        if not channel.is_founded():  # else it may still deliver what was sent before
            gone = self.gone(other, func)
            if gone is not None:
                channel.lose(gone)
        channel.start(func)
        return channel

    def on_lost(self, other: int, error: PCCLError) -> None:
        """Ends the receives that only this rank could have ended."""
        with self._lock:
            lost = [
                channel.other for channel in self._channels.values() if channel.lost is not None
            ]
            none_left = len(lost) == self._size - 1
        self.mailbox.fail(
            error, lambda letter: letter.peer == other or (none_left and letter.peer is None)
        )
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()

    def _watch(self) -> None:
        """Ends channels to ranks that have left the group.

        Their masters would tell it, too, but the master of a channel may have been in the lost process.
        """
        seen: dict[int, _settings.Deadline] = {}
        while not self._closed.is_set():
            self._begun.wait()
            self._begun.clear()
            while self._look(seen) and not self._closed.wait(_WATCH):
                pass

    def _look(self, seen: dict[int, _settings.Deadline]) -> bool:
        """Ends channels to ranks that are gone; returns whether something waits."""
        with self._lock:
            channels = list(self._channels.values())
        waits = False
        for channel in channels:
            func = channel.waiting()
            if func is None:
                continue
            waits = True
            error = self.gone(channel.other, func)
            if error is None:
                continue
            grace = seen.setdefault(channel.other, _settings.Deadline(_GRACE))
            if grace.left() == 0 or not channel.is_founded():
                channel.lose(error)
        return waits

    def leave(self) -> None:
        """Ends all with an error. May be called again."""
        with self._lock:
            self._closed.set()
            self._begun.set()
            channels = list(self._channels.values())
        error = InvalidUsage.because("shutdown", DESTROYED)
        for channel in channels:
            channel.lose(error)
        self.mailbox.fail(error, lambda _: True)

    def close(self) -> None:
        """Leaves, and waits until its threads have ended."""
        self.leave()
        with self._lock:
            channels = list(self._channels.values())
            watcher = self._watcher
        for channel in channels:
            with suppress(PCCLError):
                channel.close()
        with self._lock:
            self._channels.clear()  # torch keeps process groups in places; not so their connections
        if watcher is not None:
            await_end(watcher)

    def exchange(
        self,
        tag: int,
        sends: Mapping[int, Bytes],
        receives: Mapping[int, Bytes],
        timeout: float,
    ) -> None:
        """Sends to and receives from several ranks at once, within a collective.

        Args:
            tag: The number of this exchange in the group, which grows.
            sends: By rank.
            receives: By rank; exactly as long as what comes.
            timeout: Seconds.

        Raises:
            PCCLError: The first that failed; nothing else begins then. The others may go on for a while.
        """
        self.mailbox.drop_collectives_before(tag)
        changed = threading.Condition()
        left = len(sends) + len(receives)
        failures: list[Exception] = []

        def done(error: Exception | None) -> None:
            nonlocal left
            with changed:
                left -= 1
                if error is not None:
                    failures.append(error)
                changed.notify()

        def letters(parts: Mapping[int, Bytes]) -> list[Letter]:
            return [Letter(p, COLLECTIVE, tag, done, timeout, other) for other, p in parts.items()]

        deadline = _settings.Deadline(timeout)
        coming, going = letters(receives), letters(sends)
        try:
            for letter in coming:
                self.receive(letter)
            for letter in going:
                self.send(letter)
            with changed:
                changed.wait_for(lambda: left == 0 or bool(failures), deadline.left())
        finally:
            self.cancel([*coming, *going])
        if failures:
            raise failures[0]
        if left > 0:
            raise Timeout.because("all_to_all", f"not over after {timeout:g} s")
