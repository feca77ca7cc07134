"""Receives that wait for a message, and messages that came before their receive."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pccl import _settings
from pccl.adapters.torch.tensor_bytes import Bytes
from pccl.errors import InvalidArgument, PCCLError, Timeout

# Two kinds of messages, each with tags of its own.
USER = 0
COLLECTIVE = 1


@dataclass(eq=False)
class Letter:
    """A message to send, or a receive that waits for one.

    Attributes:
        data: The bytes to send, or the memory to receive into; a shorter message fills its start.
        kind: USER or COLLECTIVE.
        tag: 64 bits, signed.
        done: Called once, on any thread, with the error or None.
        timeout: Seconds for the whole operation.
        peer: The other rank. None receives from any, until the sender is known.
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
        """Receives `data` from rank `peer`."""
        self.peer, self.size = peer, data.size
        if data.size > self.data.size:
            self.done(too_large(peer, data.size, self.data.size))
            return
        self.data[: data.size] = data
        self.done(None)


def too_large(peer: int, size: int, room: int) -> InvalidArgument:
    sentence = f"the message from rank {peer} has {size} bytes, the tensor {room}"
    return InvalidArgument.because("recv", sentence)


def too_late(func: str, letter: Letter) -> Timeout:
    other = "any rank" if letter.peer is None else f"rank {letter.peer}"
    direction = "to" if func == "send" else "from"
    sentence = f"no message {direction} {other} with tag {letter.tag}"
    return Timeout.because(func, f"{sentence} within {letter.timeout:g} s")


def is_late(letter: Letter) -> bool:
    return letter.deadline.left() == 0


def error_of(func: str, error: PCCLError) -> PCCLError:
    """A copy of the error that names `func`. Each caller gets its own, with its own traceback."""
    made = copy.copy(error)
    made.func_name = func
    return made


@dataclass(eq=False)
class _Message:
    """A message that came before its receive."""

    peer: int
    kind: int
    tag: int
    data: Bytes


class Mailbox:
    """Waiting receives and early messages of all channels of a group. *any thread*"""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._letters: list[Letter] = []  # in the order of the calls
        self._early: list[_Message] = []  # in the order in which they came

    def post(self, letter: Letter) -> bool:
        """Fills a receive from an early message, else keeps it. Returns whether it was filled."""
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
        """The receives that a message from this rank could end. REQUIRES: `changed` is held."""
        return [letter for letter in self._letters if letter.peer in (None, peer)]

    def waits_for(self, peer: int) -> bool:
        with self.changed:
            return bool(self.wanted_from(peer))

    def claim(self, peer: int, kind: int, tag: int) -> Letter | None:
        """Removes and returns the receive that a message ends."""
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
        """Removes and returns those of these receives that still wait."""
        with self.changed:
            found = [letter for letter in self._letters if letter in letters]
            self._letters = [letter for letter in self._letters if letter not in letters]
        return found

    def drop_collectives_before(self, tag: int) -> None:
        """Drops early messages of failed collectives."""
        with self.changed:
            self._early = [m for m in self._early if m.kind != COLLECTIVE or m.tag >= tag]

    def expire(self) -> None:
        """Ends the receives whose deadline has passed."""
        with self.changed:
            late = [letter for letter in self._letters if is_late(letter)]
            self.cancel(late)
        for letter in late:
            letter.done(too_late("recv", letter))

    def fail(self, error: PCCLError, among: Callable[[Letter], bool]) -> None:
        with self.changed:
            failed = [letter for letter in self._letters if among(letter)]
            self.cancel(failed)
        for letter in failed:
            letter.done(error_of("recv", error))
