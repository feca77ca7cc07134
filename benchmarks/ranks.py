"""One rank of benchmarks/allreduce.py and collectives.py: has the arrays, and carries out what the
parent orders over a unix socket.

prepare   makes arrays of a size, and checks every case once against NumPy
block     a number of calls of one case. Before each one the whole array is rewritten, and all
          ranks meet; the time runs from there. The last result of a block is checked again
end       leaves
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np

import pccl

PATIENCE = 120  # seconds for joining, and for one call
LEAVES = 200  # of a tree
# Of benchmarks/collectives.py.
COLLECTIVES = ["all_gather", "reduce_scatter", "broadcast", "all_to_all"]
PIECE = 1 << 18  # elements compared at once
SLOT = 8  # words between two ranks' words at the start line: a cache line
MEET_ROUGHLY = 1e-3  # seconds of trying before a rank sleeps until the others come
NAP = 1e-4
TRIES = 50  # before a rank yields the core


class StartLine:
    """Where ranks meet before a call: a word of shared memory for each, which only it writes."""

    def __init__(self, path: str, rank: int, world: int) -> None:
        with open(path, "r+b") as file:
            self.words = memoryview(mmap.mmap(file.fileno(), world * SLOT * 8)).cast("q")
        self.own = rank * SLOT
        self.others = [other * SLOT for other in range(world) if other != rank]
        self.count = 0

    def meet(self) -> None:
        """Returns in all ranks at once, as far as there are cores for them."""
        self.pass_by(naps=True)  # who rewrites more slowly keeps its core
        self.pass_by(naps=False)

    def pass_by(self, naps: bool) -> None:
        words, tries, until = self.words, 0, 0.0
        self.count += 1
        words[self.own] = self.count
        for other in self.others:
            while words[other] < self.count:
                tries += 1
                if tries < TRIES:
                    continue
                tries = 0
                if not naps:
                    os.sched_yield()
                    continue
                now = time.monotonic()
                until = until or now + MEET_ROUGHLY
                if now < until:
                    os.sched_yield()
                else:
                    time.sleep(NAP)


Numbers = np.ndarray | float  # of a rank's inputs: all of them in a line, or one for all


def reduced(inputs: list[Numbers], results: list[np.ndarray]) -> list[Numbers]:
    """The result of an all-reduce, cut as `results` are."""
    total: Numbers = sum(inputs[1:], inputs[0])
    if not isinstance(total, np.ndarray):
        return [total] * len(results)
    return np.split(total, np.cumsum([array.size for array in results])[:-1])


@dataclass
class Case:
    """Something to measure, with its own part of the ranks' numbers."""

    sends: list[np.ndarray]  # rewritten before each call
    call: Callable[[], object]
    results: Callable[[], list[np.ndarray]]
    forget: Callable[[], object] = lambda: None  # before each call, too
    # The expected results, computed from all ranks' inputs.
    expected: Callable[[list[Numbers], list[np.ndarray]], list[Numbers]] = reduced
    error: float = 0.0  # of an element at most

    def right(self, inputs: list[Numbers]) -> bool:
        results = self.results()
        pairs = zip(results, self.expected(inputs, results), strict=True)
        return all(same(result, expected, self.error) for result, expected in pairs)

    def rewrite(self, number: int) -> None:
        for array in self.sends:
            if array.dtype.kind == "f":
                array.fill(number)
            else:  # bfloat16: NumPy fills it element by element
                array.view(np.uint16).fill(np.float32(number).view(np.uint32) >> 16)


def same(result: np.ndarray, expected: np.ndarray | float, error: float = 0.0) -> bool:
    """Whether all elements are right, without a temporary copy of everything."""
    flat = result.reshape(-1)
    for first in range(0, flat.size, PIECE):
        part = flat[first : first + PIECE]
        wanted = expected[first : first + PIECE] if isinstance(expected, np.ndarray) else expected
        if not (np.abs(part.astype(np.float32) - wanted) <= error).all():
            return False
    return True


class Rank:
    """This process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.world = options.world
        self.rank = options.rank
        self.mpi: Any = None
        self.dist: Any = None
        self.stream = socket.socket(socket.AF_UNIX)
        self.stream.connect(options.socket)
        self.orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        listener = threading.Thread(target=listen, args=(self.stream, self.orders), daemon=True)
        listener.start()
        if options.mpi:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"
            from mpi4py import MPI

            self.mpi = MPI
            self.rank = MPI.COMM_WORLD.Get_rank()
            if MPI.COMM_WORLD.Get_size() != self.world:
                raise SystemExit("mpi4py and mpirun do not belong together: every rank is alone")
        self.line = StartLine(options.line, self.rank, self.world)
        self.comm = pccl.init(timeout=PATIENCE)
        # By pccl's rank: members are ranked by their arrival.
        self.order: list[int] = pccl.allgather(self.rank).tolist()
        if options.gloo:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            import torch
            from torch import distributed

            torch.set_num_threads(1)
            self.torch, self.dist = torch, distributed
            distributed.init_process_group(
                "gloo",
                store=distributed.FileStore(options.gloo, self.world),  # no port to choose
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=PATIENCE),
            )
        self.cases: dict[str, Case] = {}
        self.arrays: dict[tuple[str, int], list[np.ndarray]] = {}
        self.say(rank=self.rank, pccl=pccl.__file__)

    def say(self, **what: Any) -> None:
        self.stream.sendall(json.dumps(what).encode() + b"\n")

    def obey(self) -> None:
        while True:
            order = self.orders.get()
            if order["order"] == "prepare":
                self.prepare(order["cases"], order["bytes"])
                self.say(ready=True)
            elif order["order"] == "block":
                self.say(**self.block(self.cases[order["case"]], order["calls"], order["paced"]))
            else:
                break
        self.cases.clear()
        self.arrays.clear()
        pccl.barrier(timeout=PATIENCE)
        pccl.shutdown()
        if self.dist is not None:
            self.dist.destroy_process_group()

    # Cases.

    def prepare(self, names: list[str], size: int) -> None:
        self.cases.clear()
        self.arrays.clear()
        self.cases = {name: self.case(name, size) for name in names}
        for name, case in self.cases.items():
            count = sum(array.size for array in case.sends)
            inputs = [noise(rank, count) for rank in range(self.world)]
            first = 0
            for array in case.sends:
                array.reshape(-1)[:] = inputs[self.rank][first : first + array.size]
                first += array.size
            self.line.meet()
            case.call()
            if not case.right(inputs):
                raise SystemExit(f"{name} gave a wrong result of {size} bytes")
            self.line.meet()  # some of them share arrays

    def pair(self, kind: str, count: int) -> list[np.ndarray]:
        """Memory to send and to receive, both touched; the same for all cases that want that
        kind."""
        if (kind, count) not in self.arrays:
            make = pccl.empty if kind == "shared" else np.empty
            arrays = [make((count,), dtype=dtype(kind)) for _ in range(2)]
            for array in arrays:
                array.view(np.uint16).fill(0)
            self.arrays[kind, count] = arrays
        return self.arrays[kind, count]

    def case(self, name: str, size: int) -> Case:
        """The case of that name; sizes are bytes of one rank's array."""
        comm, total = self.comm, pccl.ReduceOp.SUM
        if name.startswith(tuple(COLLECTIVES)):
            return getattr(self, name.partition(" ")[0])(name.partition(" ")[2], size)
        if name in ("bfloat16", "tree", "fresh", "int8", "sync"):
            return getattr(self, name)(size)
        kind = "shared" if name.startswith("shared") else "float32"
        send, recv = self.pair(kind, size // 4)
        if name in ("pccl", "shared"):
            return Case([send], lambda: comm.all_reduce(send, recv, op=total), lambda: [recv])
        if name == "shared in place":
            return Case([send], lambda: comm.all_reduce(send, send, op=total), lambda: [send])
        if name in ("pccl.allreduce", "flat"):
            return Case([send], lambda: pccl.allreduce(send, out=recv), lambda: [recv])
        if name == "mpi":
            world = self.mpi.COMM_WORLD
            return Case([send], lambda: world.Allreduce(send, recv), lambda: [recv])
        if name == "gloo":
            tensor, reduce = self.torch.from_numpy(send), self.dist.all_reduce
            return Case([send], lambda: reduce(tensor), lambda: [send])  # has only this form
        raise SystemExit(f"no case {name}")

    def all_gather(self, system: str, size: int) -> Case:
        """Sizes of these are bytes of all ranks' parts."""
        send, _ = self.pair("float32", size // 4 // self.world)
        recv, _ = self.pair("float32", send.size * self.world)
        call: Callable[[], object]
        order = list(range(self.world))
        if system == "mpi":
            call = partial(self.mpi.COMM_WORLD.Allgather, send, recv)
        elif system == "gloo":
            tensors = map(self.torch.from_numpy, (recv, send))
            call = partial(self.dist.all_gather_into_tensor, *tensors)
        else:
            call, order = partial(self.comm.all_gather, send, recv), self.order
        return Case(
            [send],
            call,
            lambda: np.split(recv, self.world),
            expected=lambda inputs, _: [inputs[rank] for rank in order],
        )

    def reduce_scatter(self, system: str, size: int) -> Case:
        recv, _ = self.pair("float32", size // 4 // self.world)
        send, _ = self.pair("float32", recv.size * self.world)
        call: Callable[[], object]
        rank = self.order.index(self.rank) if system == "pccl" else self.rank
        if system == "mpi":
            call = partial(self.mpi.COMM_WORLD.Reduce_scatter_block, send, recv)
        elif system == "gloo":
            tensors = map(self.torch.from_numpy, (recv, send))
            call = partial(self.dist.reduce_scatter_tensor, *tensors)
        else:
            call = partial(self.comm.reduce_scatter, send, recv, op=pccl.ReduceOp.SUM)
        own = slice(rank * recv.size, (rank + 1) * recv.size)

        def expected(inputs: list[Numbers], _: list[np.ndarray]) -> list[Numbers]:
            total: Numbers = sum(inputs[1:], inputs[0])
            return [total[own] if isinstance(total, np.ndarray) else total]

        return Case([send], call, lambda: [recv], expected=expected)

    def all_to_all(self, system: str, size: int) -> Case:
        count = size // 4 // self.world
        send, recv = self.pair("float32", count * self.world)
        order = self.order if system == "pccl" else list(range(self.world))
        own = order.index(self.rank)
        call: Callable[[], object]
        if system == "mpi":
            call = partial(self.mpi.COMM_WORLD.Alltoall, send, recv)
        elif system == "gloo":
            tensors = map(self.torch.from_numpy, (recv, send))
            call = partial(self.dist.all_to_all_single, *tensors)
        else:
            call = partial(self.comm.all_to_all, send, recv)

        def part(numbers: Numbers) -> Numbers:
            whole = isinstance(numbers, np.ndarray)
            return numbers[own * count : (own + 1) * count] if whole else numbers

        return Case(
            [send],
            call,
            lambda: np.split(recv, self.world),
            expected=lambda inputs, _: [part(inputs[rank]) for rank in order],
        )

    def broadcast(self, system: str, size: int) -> Case:
        """In place, the only form that the others have. "shared": pccl's, of shared arrays."""
        array, _ = self.pair("shared" if system == "shared" else "float32", size // 4)
        call: Callable[[], object]
        if system == "mpi":
            call = partial(self.mpi.COMM_WORLD.Bcast, array, 0)
        elif system == "gloo":
            call = partial(self.dist.broadcast, self.torch.from_numpy(array), 0)
        else:
            call = partial(self.comm.broadcast, array, root=0)
        root = self.order[0] if system in ("pccl", "shared") else 0
        return Case([array], call, lambda: [array], expected=lambda inputs, _: [inputs[root]])

    def bfloat16(self, size: int) -> Case:
        send, recv = self.pair("bfloat16", size // 2)
        return Case([send], lambda: pccl.allreduce(send, out=recv), lambda: [recv])

    def int8(self, size: int) -> Case:
        """Numbers of -8 to 8 become one of 256 before they are added, and the sums again."""
        send, recv = self.pair("float32", size // 4)
        return Case(
            [send],
            lambda: pccl.allreduce(send, out=recv, quantize="int8"),
            lambda: [recv],
            error=2 * self.world * 16 / 255,  # twice what both roundings may add up to
        )

    def sync(self, size: int) -> Case:
        """Each rank has other bytes before a call, and all have those of one rank after it."""
        state, _ = self.pair("float32", size // 4)

        def expected(inputs: list[Numbers], results: list[np.ndarray]) -> list[Numbers]:
            held = next((r for r, one in enumerate(inputs) if same(results[0], one)), -1)
            found = set(pccl.allgather(held, timeout=PATIENCE).tolist())
            return [inputs[held] if held >= 0 and len(found) == 1 else math.nan]

        return Case(
            [state],
            lambda: pccl.sync({"state": state}, progress=False),
            lambda: [state],
            expected=expected,
        )

    def fresh(self, size: int) -> Case:
        """A new result for each call; the one before is let go first."""
        send, _ = self.pair("float32", size // 4)
        kept: list[np.ndarray] = []
        return Case(
            [send],
            lambda: kept.append(pccl.allreduce(send)),
            lambda: kept[-1:],
            kept.clear,
        )

    def tree(self, size: int) -> Case:
        """Matrices and vectors, as a model has them."""
        trees = []
        for _ in range(2):
            per_layer = size // 4 // (LEAVES // 2)
            layers = {}
            for layer in range(LEAVES // 2):
                count = per_layer if layer else size // 4 - per_layer * (LEAVES // 2 - 1)
                vector = max(1, count // 64)
                layers[f"layer {layer:03}"] = {
                    "b": np.zeros(vector, np.float32),
                    "w": np.zeros(count - vector, np.float32),
                }
            trees.append(layers)
        send, recv = trees
        sends, recvs = ([leaf for layer in t.values() for leaf in layer.values()] for t in trees)
        return Case(sends, lambda: pccl.allreduce(send, out=recv), lambda: recvs)

    # Measuring.

    def block(self, case: Case, calls: int, paced: bool) -> dict[str, Any]:
        seconds: list[float] = []
        untimed = 0.0  # CPU seconds of rewriting and of waiting for the others to have done so
        gc.collect()
        gc.disable()
        case.rewrite(self.rank + 1)
        self.line.meet()
        case.call()  # warm
        self.line.meet()
        cpu = time.process_time()
        for number in range(calls):
            if paced:
                before = time.thread_time()
                case.forget()
                case.rewrite(self.rank + 1 + number % 16)
                self.line.meet()
                untimed += time.thread_time() - before
            else:  # calls that take a microsecond keep in step better by themselves
                case.rewrite(self.rank + 1 + number % 16)
            began = time.perf_counter()
            case.call()
            seconds.append(time.perf_counter() - began)
        cpu = time.process_time() - cpu - untimed
        gc.enable()
        if not case.right([float(rank + 1 + (calls - 1) % 16) for rank in range(self.world)]):
            raise SystemExit(f"a wrong result after {calls} calls")
        case.forget()
        self.line.meet()
        return {"seconds": seconds, "cpu": cpu}


def listen(stream: socket.socket, orders: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Takes orders; a rank does not outlive its parent, whatever it is doing."""
    with stream.makefile("r") as lines:
        for line in lines:
            orders.put(json.loads(line))
    os._exit(1)


def noise(rank: int, count: int) -> np.ndarray:
    """Whole numbers, so that any order of adding gives the same."""
    return np.random.default_rng(rank).integers(-8, 9, count, np.int8).astype(np.int16)


def dtype(kind: str) -> Any:
    if kind != "bfloat16":
        return np.float32
    import ml_dtypes

    return ml_dtypes.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description="A rank of benchmarks/allreduce.py.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--line", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--gloo", metavar="STORE")
    parser.add_argument("--mpi", action="store_true")
    Rank(parser.parse_args()).obey()


if __name__ == "__main__":
    main()
