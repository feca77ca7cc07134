"""How the ranks of a c10d group find each other, form a pccl group, and judge losses."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pccl import _settings
from pccl._core import FIRST_PAIR, OWN_GROUPS
from pccl.adapters.torch.work import DESTROYED, JOINING
from pccl.communicator import Communicator, MasterNode
from pccl.errors import (
    Evicted,
    InvalidUsage,
    MasterLost,
    PCCLError,
    PeerLost,
    Result,
    Timeout,
    TooFewPeers,
    Unreachable,
)

_MASTER_GONE = "rank 0, which ran the group's master, is gone"
# Seconds at least for the ranks' last step into a group, which all of them must take.
_CONFIRM = 5.0
# Seconds after which a rank that waits to get into a group looks whether it is still the one, at
# first. Later it is longer each time: a rank that looks is out of the group for a moment.
_LOOK = 1.0
# Seconds that a member which runs the master waits for the others to leave its groups.
_FAREWELL = 10.0


def _has(store: Any, keys: Sequence[str]) -> bool:
    try:
        return bool(store.check(list(keys)))
    except Exception:  # its process is gone
        return True


class _Master:
    """The master that this process runs for groups whose first rank it is, without PCCL_MASTER.

    Its end ends those groups, as does the end of any member.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._node: MasterNode | None = None
        self._groups = 0
        # Stores of groups that this process has left, with keys by which others say that they left.
        self._staying: list[tuple[Any, Sequence[str]]] = []

    def acquire(self, host: str) -> str:
        with self._lock:
            if self._node is None:
                node = MasterNode(f"{host}:0")
                node.run()
                self._node = node
            self._groups += 1
            return self._node.address

    def release(self, store: Any, keys: Sequence[str]) -> None:
        """Ends its use for a group. Members set `keys` in the store when they leave that group.

        Others may stay in the group as long as the master serves another one. After the last one it
        waits a while for all of them.
        """
        with self._lock:
            self._groups -= 1
            if keys:
                self._staying.append((store, keys))
            before = list(self._staying)
        over = [group for group in before if _has(*group)]  # without the lock: it may take long
        with self._lock:
            self._staying = [group for group in self._staying if group not in over]
            if self._groups > 0 or self._node is None:
                return
            node, self._node = self._node, None
            staying, self._staying = self._staying, []
        deadline = time.monotonic() + _FAREWELL
        try:
            for store, keys in staying:
                # Stores take 0 for no limit.
                left = max(deadline - time.monotonic(), 0.001)
                with suppress(Exception):  # members that do not leave in time are cut off
                    store.wait(list(keys), timedelta(seconds=left))
        finally:
            node.interrupt()


_master = _Master()


def _own_host(first_of_job: bool) -> str:
    """An address of this host that the group's other members reach."""
    name = _settings.text("PCCL_BIND")
    if name is None and first_of_job:
        name = _settings.text("MASTER_ADDR")  # of the job's first rank, by torch's convention
    family, _, _, _, address = socket.getaddrinfo(
        name or socket.gethostname(), 0, type=socket.SOCK_STREAM
    )[0]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


class _Dead(Exception):
    """A group that cannot become whole any more."""


class Member:
    """This process as one of the fixed members of a pccl group. *any thread*

    Members meet through keys of the c10d store. "group" has the pccl group's number, and the
    master's address if a member runs it. The other keys begin with that number, so those of an
    earlier start of the job differ: torchrun may restart the ranks with the same store. A rank that
    gave up before all were there leaves a dead group. Then rank 0 makes a new number, and the
    others follow it there.

    | key | value |
    |---|---|
    | "here/<rank>" | a word of the rank's own |
    | "peer/<rank>" | its peer id |
    | "left/<rank>" | it has left |
    | "all" | the words that rank 0 has read |

    Args:
        store: Of c10d.
        name: Of the c10d group.
        members: Global ranks, by rank in this group.
        rank: This process's, in this group.
        timeout: Seconds for `join`.
        word: Names this process in the store.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        members: Sequence[int],
        rank: int,
        timeout: float,
        word: str,
    ) -> None:
        self.size = len(members)
        self._store = store
        self._name = f"{name}|{','.join(map(str, members))}|"
        self._number = -1  # of the pccl group; none yet
        self._rank = rank
        self._timeout = timeout
        self._first_of_job = members[0] == 0
        self._word = word
        self.master_inside = False  # whether a member runs the master
        self._serves = ""  # address of the master that this process runs for the group
        self._comm: Communicator | None = None
        self._peers: list[str] = []  # ids, by rank
        self.order: list[int] = []  # pccl's ranks, by rank; empty until `join` is over
        self._present: list[int] = []  # ranks that were there when this one left
        self._left = threading.Event()
        self._lock = threading.Lock()  # guards _serves, _comm and the setting of _left

    @property
    def comm(self) -> Communicator:
        assert self._comm is not None, "join first"
        return self._comm

    def join(self) -> None:
        """Founds or joins the group. Returns when all are there; raises if this member leaves."""
        if self.order:
            return
        deadline = _settings.Deadline(self._timeout)
        try:
            while not self.order:
                try:
                    self._enter(self._meet(deadline), deadline)
                    self.order = self._confirm(deadline)
                except _Dead:
                    self._await_another(deadline)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and not isinstance(error, PCCLError):
                sentence = f"the c10d store failed: {str(error).partition(chr(10))[0]}"
                raise Unreachable.because(JOINING, sentence) from error
            raise

    def _enter(self, address: str, deadline: _settings.Deadline) -> None:
        """Joins the pccl group; returns when it has started."""
        with self._lock:
            self._check_not_left()
            self._comm = Communicator._of_own_group(self._number, address)
        seconds = _LOOK
        while True:
            left = deadline.left()
            assert left is not None
            # Only rank 0 makes numbers.
            step = left if self._rank == 0 else min(seconds, left)
            seconds *= 2
            try:
                self.comm._join(
                    JOINING, min_peers=self.size, attempts=30, timeout=step, enter=False
                )
                return
            except PCCLError as error:
                self._check_not_left()
                if self._is_dead():
                    raise _Dead from None
                if not isinstance(error, Timeout) or step == left:
                    raise

    def _confirm(self, deadline: _settings.Deadline) -> list[int]:
        """Returns pccl's ranks, by rank, when all ranks know that all are in."""
        engine = self.comm._joined(JOINING)
        self._store.set(self._key("peer", self._rank), engine.peer_id())
        # Also after the deadline: one that gave up now would leave the others in a dead group.
        last = _settings.Deadline(max(_CONFIRM, deadline.left() or 0.0))
        present = engine.membership()[3]

        def dead() -> bool:
            return len(engine.present()) < self.size or self._is_dead()

        self._peers = [self._read("peer", other, last, dead) for other in range(self.size)]
        if set(present) != set(self._peers):
            sentence = f"peers that are not of this job are in pccl group {self._number}"
            raise InvalidUsage.because(JOINING, sentence)
        return [present.index(peer) for peer in self._peers]

    def _is_dead(self) -> bool:
        """Whether rank 0 has another group now."""
        number, _, _ = (self._get("group") or "").partition(" ")
        return number != str(self._number)

    def _await_another(self, deadline: _settings.Deadline) -> None:
        """Leaves a dead group, and waits until another one may be there."""
        self.comm.close()
        if self._rank != 0:
            self.poll(self._is_dead, deadline)

    def _meet(self, deadline: _settings.Deadline) -> str:
        """Agrees with the other ranks on the group's number; returns its master's address."""
        address = (_settings.text("PCCL_MASTER") or "").replace(" ", "") or None
        if self._rank == 0:
            where = f"outside {address}" if address else f"inside {self._serve()}"
            # Random: one master may serve many jobs, and jobs have the same names for their groups.
            key = self._name.encode() + os.urandom(16)
            digest = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
            self._number = OWN_GROUPS + digest % (FIRST_PAIR - OWN_GROUPS)
            self._store.set("group", f"{self._number} {where}")
            words = [self._read("here", other, deadline) for other in range(1, self.size)]
            self._store.set(self._key("all"), " ".join(words))
        else:
            where = self._find(deadline)
        where, given = where.split(" ")
        self.master_inside = where == "inside"
        return given if self.master_inside or not address else address

    def _find(self, deadline: _settings.Deadline) -> str:
        """Where the group's master is. The group is the one in which rank 0 answers this word."""
        where = ""

        def answered() -> bool:
            nonlocal where
            group = self._get("group")
            if group is None:
                return False
            number, where = group.split(" ", 1)
            if int(number) != self._number:  # the first one seen, or newer than a previous start's
                self._number = int(number)
                self._store.set(self._key("here", self._rank), self._word)
            return self._word in (self._get(self._key("all")) or "").split(" ")

        self.poll(answered, deadline)
        return where

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._number}/{what}" if rank is None else f"{self._number}/{what}/{rank}"

    def _get(self, key: str) -> str | None:
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value.decode()

    def _read(
        self,
        what: str,
        rank: int,
        deadline: _settings.Deadline,
        dead: Callable[[], bool] = lambda: False,
    ) -> str:
        """Waits for and returns what a rank has set, as long as the group is not dead."""
        key = self._key(what, rank)

        def is_there() -> bool:
            if self._store.check([key]):
                return True
            # Those who know that all are in may leave again.
            if dead() and not self._store.check([key]):
                raise _Dead
            return False

        self.poll(is_there, deadline)
        return self._get(key) or ""

    def poll(self, is_there: Callable[[], bool], deadline: _settings.Deadline) -> None:
        """Waits until `is_there()`. The store's own waiting could not be interrupted."""
        pause = 0.001
        while not is_there():
            self._check_not_left()
            if deadline.left() == 0:
                sentence = f"the group's other ranks did not all come within {self._timeout:g} s"
                raise Timeout.because(JOINING, sentence)
            self._left.wait(pause)
            pause = min(2 * pause, 0.1)

    def _check_not_left(self) -> None:
        if self._left.is_set():
            raise InvalidUsage.because(JOINING, DESTROYED)

    def _serve(self) -> str:
        if self._serves:
            return self._serves
        try:
            address = _master.acquire(_own_host(self._first_of_job))
        except (OSError, PCCLError) as error:
            sentence = (
                f"could not start a master for this group: {error}; set PCCL_BIND to an address of this "
                "host that the others reach, or start `pccl master` and set PCCL_MASTER"
            )
            raise InvalidUsage.because("init_process_group", sentence) from error
        with self._lock:
            self._serves = address
        return address

    def loss(self, error: PCCLError) -> PCCLError | None:
        """The error for all later calls if `error` ends this group for good; else None."""
        func = error.func_name
        if isinstance(error, MasterLost) and self.master_inside:
            return self._lost(func, _MASTER_GONE, 0)
        if isinstance(error, MasterLost | Evicted | Unreachable):
            return error
        if not isinstance(error, PeerLost | TooFewPeers):
            return None
        # The membership of the call that failed: others that met the same loss may have left since.
        try:
            gone = self._absent(self.comm._joined(func).membership()[3])
        except PCCLError:  # another thread has closed it
            return None
        if not gone:
            return None
        named = "rank " + str(gone[0]) if len(gone) == 1 else f"ranks {gone}"
        sentence = f"{named} of {self.size} {'is' if len(gone) == 1 else 'are'} gone"
        return self._lost(func, sentence, gone[0])

    def gone(self) -> list[int]:
        """The ranks that have left the group or were lost, as far as this member knows."""
        try:
            return self._absent(self.comm._joined("membership").present())
        except PCCLError:  # another thread has closed it
            return []

    def _absent(self, present: Sequence[str]) -> list[int]:
        return [rank for rank, peer in enumerate(self._peers) if peer not in present]

    def say(self, what: str) -> None:
        """Tells the other ranks that this one has reached `what`."""
        self._store.set(self._key(what, self._rank), "1")

    def said(self, what: str, rank: int) -> bool:
        return bool(self._store.check([self._key(what, rank)]))

    def departed(self, rank: int, func: str) -> PCCLError | None:
        """The error of a rank that has left or was lost, as far as this member knows; or None."""
        if not self.order or self._left.is_set():
            return None
        if rank in self.gone():
            return self._lost(func, f"rank {rank} of {self.size} is gone", rank)
        with suppress(PCCLError):
            if self.comm._joined(func).is_open():
                return None
        # The engine has ended.
        if rank == 0 and self.master_inside:
            return self._lost(func, _MASTER_GONE, 0)
        return None

    def _lost(self, func: str, sentence: str, rank: int) -> PeerLost:
        advice = "a c10d group has a fixed world: make new groups, or restart the job"
        code = Result.RANK_CONNECTION_LOST
        return PeerLost(code, func, f"{sentence}; {advice}", peer=self._peers[rank])

    def leave(self) -> None:
        """Leaves the group; the others see a departure. May be called again."""
        with self._lock:
            if self._left.is_set():
                return
            self._left.set()
            comm = self._comm
        if comm is not None:
            with suppress(PCCLError):
                # Not those that were there in the last call: a lost one would never leave.
                present = comm._joined("shutdown").present()
                self._present = [r for r, peer in enumerate(self._peers) if peer in present]
            comm.close()
        with suppress(Exception):  # the store's process may be gone
            self._store.set(self._key("left", self._rank), "1")

    def close(self) -> None:
        """Leaves. The last group that this process serves waits a while for the others to leave."""
        self.leave()
        with self._lock:
            serves, self._serves = self._serves, ""
        if serves:
            _master.release(self._store, [self._key("left", rank) for rank in self._present])
