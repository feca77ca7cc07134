"""Members whose control connection breaks, or whose master is restarted, while calls are open."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import threading
from collections.abc import Iterator

from workers import running

import pccl

CALLS = 9000
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "6",
    "PCCL_RECONNECT_TIMEOUT": "20",
}

# The entries of all these calls, with what describes them, are longer than a first message may be.
MANY = f"""
comm = start()
say(event="in")
hear()
tree = {{f"a layer with a long name {{i}}": np.ones(2, np.float32) for i in range(4)}}
works = [pccl.allreduce_async(tree, tag=n) for n in range({CALLS})]
say(event="called", open=comm._engine.unfinished())
for work in works:
    for array in work.wait().values():
        assert (array == pccl.world_size()).all()
say(event="done")
hear()
"""


class Middle:
    """Passes on what peers and their master say, until it is told to cut all connections."""

    def __init__(self, master: str) -> None:
        host, _, port = master.rpartition(":")
        self._master = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._master)
                with self._lock:
                    self._sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for end in sockets:
            # A reset, so that nothing that was said before is still read.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def between(master: str) -> Iterator[Middle]:
    middle = Middle(master)
    try:
        yield middle
    finally:
        middle.close()


def test_a_member_with_many_open_calls_comes_back_to_its_master() -> None:
    with running(**FAST, PCCL_SHM="0") as run, between(run.address) as middle:
        caller = run.peer(MANY, PCCL_MIN_PEERS="2", PCCL_MASTER=middle.address)
        other = run.peer(MANY, PCCL_MIN_PEERS="2")
        for peer in (caller, other):
            peer.expect("in")
        caller.tell("go")
        assert caller.expect("called", 60)["open"] == CALLS
        middle.cut()
        other.tell("go")
        other.expect("called", 60)
        for peer in (caller, other):
            peer.expect("done", 120)


def test_members_with_many_open_calls_come_back_to_a_restarted_master() -> None:
    with running(**FAST, PCCL_SHM="0") as run:
        caller, other = run.peers(2, MANY)
        for peer in (caller, other):
            peer.expect("in")
        caller.tell("go")
        assert caller.expect("called", 60)["open"] == CALLS
        run.master.signal(signal.SIGKILL)
        run.master.ends()
        run.restart_master()
        other.tell("go")
        other.expect("called", 60)
        for peer in (caller, other):
            peer.expect("done", 120)


def test_a_call_that_started_over_in_memory_is_over_for_the_master_too() -> None:
    """It was entered over the network; then the two found out that they share memory."""
    code = """
    late = os.environ.get("LATE")
    start()
    if late:
        threading.Event().wait(0.5)  # longer than it takes to find the other one's memory
    pccl.allreduce(x())
    say(event="called")
    end = threading.Event()
    threading.Timer(4, end.set).start()  # twice the straggler timeout
    while not pccl.allreduce(int(end.is_set())):
        pass
    say(event="done")
    hear()
    """
    with running(**FAST, PCCL_STRAGGLER_TIMEOUT="2", PCCL_MIN_PEERS="2") as run:
        peers = [run.peer(code), run.peer(code, LATE="1")]
        for event in ("called", "done"):
            for peer in peers:
                peer.expect(event)
        assert all("waiting for 1 peer in" not in peer.stderr() for peer in peers)


def test_a_loss_that_ended_very_many_calls_is_told_to_a_restarted_master() -> None:
    """The log that the master asks for has it as one entry, longer than a first message may be."""
    count = 43_000
    code = f"""
    comm = start()
    say(event="in")
    hear()
    x, made = np.ones(1, np.int64), np.zeros(({count}, 1), np.int64)
    handles = [comm.all_reduce_async(x, one, op="sum") for one in made]
    say(event="called", open=comm._engine.unfinished())
    say(event="ended", ends=sorted({{handle.wait()[1] for handle in handles}}))
    hear()
    comm.all_reduce(x, made[0], op="sum")
    say(event="done", made=int(made[0][0]))
    """
    # Nobody is evicted while one member is stopped.
    patient = {**FAST, "PCCL_HEARTBEAT_TIMEOUT": "90", "PCCL_RECONNECT_TIMEOUT": "90"}
    with running(**patient, PCCL_SHM="0") as run:
        *callers, lost = run.peers(3, code)
        for peer in (*callers, lost):
            peer.expect("in")
        for peer in callers:
            peer.tell("go")
            assert peer.expect("called", 120)["open"] == count
        told, late = callers
        late.signal(signal.SIGSTOP)  # so that the entry stays in the other one's log
        lost.signal(signal.SIGKILL)
        lost.ends()
        failed = [int(pccl.Result.RANK_CONNECTION_LOST)]
        assert told.expect("ended", 120)["ends"] == failed
        run.master.signal(signal.SIGKILL)
        run.master.ends()
        run.restart_master()
        late.signal(signal.SIGCONT)
        assert late.expect("ended", 120)["ends"] == failed
        for peer in callers:
            peer.tell("go")
        for peer in callers:
            assert peer.expect("done", 60)["made"] == 2
