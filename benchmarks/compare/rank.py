"""A rank of benchmarks/compare/run.py: reduces arrays with one library, as its parent orders over a
unix socket.

prepare   makes the arrays of a size, calls once, and checks the result
block     a number of calls of a case. Before each call the array is rewritten and all ranks meet;
          the time runs from there. The results are checked in between, outside the measured time
end       leaves
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ranks import StartLine, same  # noqa: E402

PATIENCE = timedelta(seconds=60)
WORLD_PREFIX = "compare"


class Library:
    """One library, as a rank uses it. `fill` and `result` are not measured, `call` is."""

    mean = False  # the result is the mean, not the sum

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def prepare(self, count: int) -> None:
        self.send = np.zeros(count, np.float32)
        self.recv = np.zeros(count, np.float32)

    def fill(self, value: float) -> None:
        self.send.fill(value)

    def begin(self, case: str) -> None:
        """Before a block."""

    def call(self, case: str) -> None:
        raise NotImplementedError

    def finish(self, case: str) -> None:
        """After a block."""

    def result(self) -> np.ndarray:
        return self.recv

    def end(self) -> None:
        """Leaves."""


class Pccl(Library):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        import pccl

        self.pccl = pccl
        pccl.init(timeout=PATIENCE.seconds)

    def call(self, case: str) -> None:
        self.pccl.allreduce(self.send, out=self.recv)

    def end(self) -> None:
        self.pccl.shutdown()


class Gloo(Library):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        store = dist.FileStore(os.environ["COMPARE_STORE"], world)  # no port to choose
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self.tensor = self.torch.from_numpy(self.send)

    def call(self, case: str) -> None:
        self.dist.all_reduce(self.tensor)

    def result(self) -> np.ndarray:
        return self.send  # in place is its only form


class Mpi(Library):
    def __init__(self, rank: int, world: int) -> None:
        from mpi4py import MPI

        self.comm: Any = MPI.COMM_WORLD
        super().__init__(self.comm.Get_rank(), self.comm.Get_size())
        if self.world != world:
            raise SystemExit("mpi4py and mpirun do not belong together: every rank is alone")

    def call(self, case: str) -> None:
        self.comm.Allreduce(self.send, self.recv)


class Mpi4jax(Mpi):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        import jax
        import mpi4jax
        from mpi4py import MPI

        self.jax = jax
        self.reduce = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM))

    def fill(self, value: float) -> None:
        filled = self.jax.numpy.full(self.send.shape, value, np.float32)
        self.array = self.jax.block_until_ready(filled)

    def call(self, case: str) -> None:
        self.answer = self.jax.block_until_ready(self.reduce(self.array))

    def result(self) -> np.ndarray:
        return np.asarray(self.answer)


class Torchft(Library):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        import torch
        import torch.distributed as dist
        from torchft import Manager, ProcessGroupGloo

        torch.set_num_threads(1)
        self.torch, self.sum = torch, dist.ReduceOp.SUM
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            ProcessGroupGloo(PATIENCE),
            lambda state: None,
            dict,
            min_replica_size=1,
            store_addr="localhost",
            store_port=self.store.port,
            rank=0,
            world_size=1,
            hostname="localhost",
            init_sync=False,
        )
        self.prepare(4)
        until = time.monotonic() + PATIENCE.seconds
        steps = 0  # in which all have taken part, so that none is healing
        while steps < 3:
            if time.monotonic() > until:
                raise SystemExit("torchft formed no quorum of all ranks")
            self.begin("step")
            self.call("step")
            steps = steps + 1 if self.manager.num_participants() == self.world else 0

    def prepare(self, count: int) -> None:
        super().prepare(count)
        self.tensor = self.torch.from_numpy(self.send)

    def begin(self, case: str) -> None:
        if case == "inner":  # one step for the whole block
            self.manager.start_quorum()
            self.manager.wait_quorum()

    def call(self, case: str) -> None:
        if case == "inner":
            self.manager.allreduce(self.tensor, reduce_op=self.sum).wait()
            return
        self.manager.start_quorum()
        self.manager.allreduce(self.tensor, reduce_op=self.sum).wait()
        self.committed = self.manager.should_commit()

    def finish(self, case: str) -> None:
        if case == "inner":
            self.committed = self.manager.should_commit()
        if not self.committed:
            raise SystemExit("torchft did not commit")

    def result(self) -> np.ndarray:
        return self.send

    def end(self) -> None:
        self.manager.shutdown(wait=False)


class Hivemind(Library):
    mean = True

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        import hivemind
        import torch

        torch.set_num_threads(1)
        self.hivemind, self.torch = hivemind, torch
        peers = os.environ["INITIAL_PEERS"].split()
        self.dht = hivemind.DHT(peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
        self.averager: Any = None

    def prepare(self, count: int) -> None:
        if self.averager is not None:
            self.averager.shutdown()
        self.averager = self.hivemind.DecentralizedAverager(
            [self.torch.zeros(count)],
            self.dht,
            prefix=f"{WORLD_PREFIX}_{count}",
            target_group_size=self.world,
            start=True,
        )

    def fill(self, value: float) -> None:
        with self.averager.get_tensors() as tensors:
            tensors[0].fill_(value)

    def call(self, case: str) -> None:
        self.averager.step(timeout=PATIENCE.seconds)

    def result(self) -> np.ndarray:
        with self.averager.get_tensors() as tensors:
            return tensors[0].numpy().copy()

    def end(self) -> None:
        if self.averager is not None:
            self.averager.shutdown()
        self.dht.shutdown()


LIBRARIES = {
    "pccl": Pccl,
    "gloo": Gloo,
    "mpi": Mpi,
    "mpi4jax": Mpi4jax,
    "torchft": Torchft,
    "hivemind": Hivemind,
}


class Rank:
    """This process: carries out orders, and checks every block's results."""

    def __init__(self, library: Library, line: StartLine) -> None:
        self.library, self.line = library, line
        self.calls = 0

    def prepare(self, size: int) -> dict[str, Any]:
        self.library.prepare(size // 4)
        return {}

    def once(self, case: str) -> tuple[float, bool]:
        """One call: its seconds, and whether all elements are right."""
        library, world = self.library, self.library.world
        self.calls += 1
        base = self.calls % 16
        library.fill(float(library.rank + 1 + base))
        self.line.meet()
        began = time.perf_counter()
        library.call(case)
        seconds = time.perf_counter() - began
        expected = world * (world + 1) / 2 + world * base
        if not library.mean:
            return seconds, same(library.result(), expected)
        result = library.result()
        low, high = float(result.min()), float(result.max())
        if not (1 + base - 1e-3 < high < world + base + 1e-3):
            raise SystemExit(f"a wrong mean: {low} to {high}")
        return seconds, abs(low - expected / world) < 1e-3 and abs(high - low) < 1e-3

    def block(self, case: str, calls: int) -> dict[str, Any]:
        self.library.begin(case)
        results = [self.once(case) for _ in range(calls + 1)]
        self.library.finish(case)
        wrong = sum(not right for _, right in results)
        if wrong and not self.library.mean:
            raise SystemExit(f"{wrong} wrong results in {case}")
        # The first call finds caches and links cold. A partial mean is not an error of hivemind.
        return {"seconds": [seconds for seconds, _ in results[1:]], "partial": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description="A rank of benchmarks/compare/run.py.")
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--line", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, required=True)
    options = parser.parse_args()
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(options.socket)
    library = LIBRARIES[options.library](options.rank, options.world)
    rank = Rank(library, StartLine(options.line, library.rank, options.world))

    def say(**what: Any) -> None:
        stream.sendall(json.dumps(what).encode() + b"\n")

    say(rank=library.rank)
    with stream.makefile("r") as lines:
        for line in lines:
            order = json.loads(line)
            name = order.pop("order")
            if name == "end":
                watchdog = threading.Timer(10, os._exit, [1])  # some libraries wait when leaving
                watchdog.daemon = True
                watchdog.start()
                library.end()
                say(ended=True)
                break
            say(**(rank.prepare if name == "prepare" else rank.block)(**order))
    sys.stdout.flush()
    os._exit(0) if options.library not in ("mpi", "mpi4jax") else None


if __name__ == "__main__":
    main()
