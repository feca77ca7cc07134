"""A c10d group's messages: its channels, and the watch over the ranks at their other ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from pccl import _settings
from pccl.adapters.torch.channel import Channel
from pccl.adapters.torch.errors import as_torch_error
from pccl.adapters.torch.mailbox import COLLECTIVE, Letter, Mailbox
from pccl.adapters.torch.rendezvous import Member
from pccl.adapters.torch.tensor_bytes import Bytes
from pccl.adapters.torch.work import DESTROYED, Work, await_end, start_thread
from pccl.errors import InvalidUsage, PCCLError, PeerLost, Timeout

_GRACE = 1.0  # seconds that a channel has to deliver what a rank sent before it left
_WATCH = 0.1  # seconds between two looks at the members of the group


class Receipt(Work):
    """A message under way; after a receive, also its sender."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__(results)
        self.source: Letter | None = None  # of a receive

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        if self.source is None or self.source.peer is None:
            sentence = "no message has come" if self.source else "nothing is received here"
            raise as_torch_error(InvalidUsage.because("source_rank", sentence))
        return self.source.peer

    _source_rank = source_rank


class Messages:
    """A group's messages. *any thread*

    Args:
        rank: This process's.
        size: Of the group.
        name: For the threads.
        make: Makes this process's member of the group of two with a rank, within some seconds.
        gone: As of `Channel`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        make: Callable[[int, float], Member],
        gone: Callable[[int, str], PCCLError | None],
    ) -> None:
        self.mailbox = Mailbox()
        self._rank = rank
        self._size = size
        self._name = name
        self._make = make
        self.gone = gone
        self._lock = threading.Lock()  # guards what follows
        self._channels: dict[int, Channel] = {}
        self._watcher: threading.Thread | None = None
        self._begun = threading.Event()  # something may wait
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
        """Starts the channels that sends to `to` and receives from `by` need.

        Raises:
            PCCLError: As `send`.
        """
        for other in to:
            self._ready(other, "send")
        for other in by:
            self._ready(other, "recv")

    def cancel(self, letters: Sequence[Letter]) -> list[Letter]:
        """Removes and returns those of these that have not begun. Their `done` is not called."""
        found = self.mailbox.cancel(letters)
        for channel in self._all():
            found += channel.cancel(letters)
        return found

    def _all(self) -> list[Channel]:
        with self._lock:
            return list(self._channels.values())

    def _ready(self, other: int, func: str) -> Channel:
        with self._lock:
            if self._closed.is_set():
                raise InvalidUsage.because(func, DESTROYED)
            if self._watcher is None:
                name = f"{self._name} watch"
                self._watcher = start_thread(self._watch, name, func, "messages")
            channel = self._channels.get(other)
            if channel is None:
                lower, higher = sorted((self._rank, other))
                channel = self._channels[other] = Channel(
                    other,
                    f"{self._name} {lower}-{higher}",
                    self._rank == lower,
                    lambda timeout: self._make(other, timeout),
                    self.mailbox,
                    self.gone,
                    self.on_lost,
                )
        if not channel.is_founded():  # else it may still deliver what was sent before
            gone = self.gone(other, func)
            if gone is not None:
                channel.lose(gone)
        channel.start(func)
        return channel

    def on_lost(self, other: int, error: PCCLError) -> None:
        """Ends the receives that only this rank could have ended."""
        lost = sum(channel.lost is not None for channel in self._all())
        none_left = lost == self._size - 1
        self.mailbox.fail(
            error, lambda letter: letter.peer == other or (none_left and letter.peer is None)
        )
        with self.mailbox.changed:
            self.mailbox.changed.notify_all()

    def _watch(self) -> None:
        """Ends channels to ranks that have left the group, and messages that are late.

        A channel's master reports a loss too, but it may have been in the lost process. A channel's
        threads may wait for the c10d store.
        """
        seen: dict[int, _settings.Deadline] = {}
        while not self._closed.is_set():
            self._begun.wait()
            self._begun.clear()
            while self._look(seen) and not self._closed.wait(_WATCH):
                pass

    def _look(self, seen: dict[int, _settings.Deadline]) -> bool:
        """Ends what is late, and channels to ranks that are gone. True if something waits."""
        self.mailbox.expire()
        waits = False
        for channel in self._all():
            channel.expire()
            func = channel.waiting()
            if func is None:
                continue
            waits = True
            error = self.gone(channel.other, func)
            if error is not None:
                grace = seen.setdefault(channel.other, _settings.Deadline(_GRACE))
                if grace.left() == 0 or not channel.is_founded():
                    channel.lose(error)
        return waits

    def leave(self) -> None:
        """Ends all messages with an error. May be called again."""
        with self._lock:  # no channel is made after this
            self._closed.set()
            self._begun.set()
        error = InvalidUsage.because("shutdown", DESTROYED)
        for channel in self._all():
            channel.lose(error)
        self.mailbox.fail(error, lambda _: True)

    def close(self) -> None:
        """Leaves, and waits until its threads have ended."""
        self.leave()
        for channel in self._all():
            with suppress(PCCLError):
                channel.close()
        with self._lock:
            watcher = self._watcher
            self._channels.clear()  # torch may keep the process group; its connections must end
        if watcher is not None:
            await_end(watcher)

    def exchange(
        self, tag: int, sends: Mapping[int, Bytes], receives: Mapping[int, Bytes], timeout: float
    ) -> None:
        """Sends to and receives from several ranks at once, within a collective.

        Args:
            tag: The number of this exchange in the group, which grows.
            sends: By rank.
            receives: By rank; exactly as long as what comes.
            timeout: Seconds.

        Raises:
            PCCLError: The first failure; nothing else begins then. The rest may run for a while.
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
            # Taken out: its traceback has this frame.
            raise failures.pop(0)
        if left > 0:
            raise Timeout.because("all_to_all", f"not over after {timeout:g} s")
