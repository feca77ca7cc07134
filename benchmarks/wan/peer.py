"""One host of benchmarks/wan/run.py: joins, has the array, and carries out orders from standard
input.

size      makes arrays of that many bytes
ready     fills them for a call
prepare   announces a call of pccl in so many seconds
go        one all-reduce by one system; answers with a line of JSON: when it began and ended by the
          clock that all processes of this machine share, whether every element is right, and the
          CRC of the result; pccl's also how often it was run
end       leaves

Systems: "pccl" is one `pccl.allreduce`, "prepared" another one, and "plain" one that is never
quantized; "gloo1" one all-reduce of torch.distributed's Gloo; "gloo8" eight slices of the array at
once, each in a group, with connections and a thread, of its own.

    python benchmarks/wan/peer.py --master      # serves as master instead
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import next_order, say

import pccl

PATIENCE = 600.0  # seconds for joining, and for one call
OURS = ("pccl", "prepared", "plain")
PERIOD = 127  # of the numbers in an array: sums of few hosts are exact in float16, too
# How far a sum may be off, for each host: twice the largest rounding error of numbers below PERIOD
# + 8, made twice.
TOLERANCE = {"int8": 2 * 0.6, "int4": 2 * 10.0, "float8": 2 * 17.0}


def groups_of(system: str) -> int:
    """How many groups of Gloo; 0: it is pccl."""
    return int(system.removeprefix("gloo")) if system.startswith("gloo") else 0


class Gloo:
    """torch.distributed, with as many groups as any of the systems needs."""

    def __init__(self, host: int, hosts: int, store: str, groups: int, device: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = device
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        self.torch, self.distributed = torch, distributed
        patience = timedelta(seconds=PATIENCE)
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(store, hosts),  # no port to choose
            rank=host,
            world_size=hosts,
            timeout=patience,
        )
        self.groups = [distributed.new_group(timeout=patience) for _ in range(groups)]
        self.threads = ThreadPoolExecutor(groups)

    def call(self, array: np.ndarray, groups: int) -> None:
        tensor = self.torch.from_numpy(array)
        reduce = self.distributed.all_reduce
        slices = tensor.chunk(groups)
        list(self.threads.map(lambda part, group: reduce(part, group=group), slices, self.groups))

    def close(self) -> None:
        self.threads.shutdown()
        self.distributed.destroy_process_group()


class Host:
    """This process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.host, self.hosts = options.host, options.hosts
        self.quantize = options.quantize
        self.dtype = np.dtype(options.dtype)
        self.calls = 0
        groups = max(map(groups_of, options.systems))
        self.pccl = "pccl" in options.systems
        self.comm = pccl.init(timeout=PATIENCE) if self.pccl else None
        self.gloo = None
        if groups > 0:
            self.gloo = Gloo(self.host, self.hosts, options.store, groups, options.device)
        self.base = self.array = self.out = np.empty(0, self.dtype)

    def size(self, size: int) -> None:
        count = size // self.dtype.itemsize
        self.base = np.resize(np.arange(PERIOD, dtype=self.dtype), count)
        self.array, self.out = np.empty_like(self.base), np.zeros_like(self.base)

    def ready(self) -> None:
        """Other numbers each time: a result of the call before is a wrong one."""
        self.calls += 1
        np.add(self.base, self._added(self.host), out=self.array)

    def _added(self, host: int) -> int:
        return 3 * host + self.calls % 8

    def optimize(self) -> dict[str, Any]:
        assert self.comm is not None
        begin = time.monotonic()
        self.comm.optimize_topology()
        seconds = time.monotonic() - begin
        return {"seconds": seconds, "kind": self.comm.topology().schedules[-1].kind}

    def go(self, system: str) -> dict[str, Any]:
        call: Callable[[], pccl.ReduceInfo | None]
        quantize = self.quantize if system in ("pccl", "prepared") else None
        if system in OURS:
            result, call = self.out, partial(self._pccl, quantize)
        else:
            assert self.gloo is not None
            result = self.array
            call = partial(self.gloo.call, self.array, groups_of(system))
        cpu = time.process_time()
        begin = time.monotonic()
        info = call()
        end = time.monotonic()
        cpu = time.process_time() - cpu
        answer = {"begin": begin, "end": end, "cpu": cpu}
        answer["right"] = self._is_right(result, quantize)
        answer["crc"] = zlib.crc32(result.tobytes())
        return answer | ({} if info is None else {"attempts": info.attempts})

    def _pccl(self, quantize: str | None) -> pccl.ReduceInfo:
        how: Any = {"out": self.out, "quantize": quantize, "return_info": True}
        info: pccl.ReduceInfo = pccl.allreduce(self.array, "sum", **how)[1]
        return info

    def _is_right(self, result: np.ndarray, quantize: str | None) -> bool:
        added = sum(self._added(host) for host in range(self.hosts))
        expected = np.arange(PERIOD, dtype=self.dtype) * self.hosts + added
        tolerance = TOLERANCE[quantize] * self.hosts if quantize else 0
        whole = len(result) // PERIOD * PERIOD
        rows, rest = result[:whole].reshape(-1, PERIOD), result[whole:]
        off = max(
            abs(rows - expected).max(initial=0), abs(rest - expected[: len(rest)]).max(initial=0)
        )
        return bool(off <= tolerance)

    def obey(self) -> None:
        while (order := next_order())["order"] != "end":
            if order["order"] == "size":
                self.size(order["bytes"])
                say("sized")
            elif order["order"] == "optimize":
                say("optimized", **self.optimize())
            elif order["order"] == "ready":
                self.ready()
                say("ready")
            elif order["order"] == "prepare":
                pccl.prepare(order["seconds"])
            else:
                say("done", **self.go(order["system"]))
        if self.pccl:
            pccl.shutdown()
        if self.gloo is not None:
            self.gloo.close()


def serve() -> None:
    with pccl.MasterNode("0.0.0.0:0") as master:
        say("listening", port=int(master.address.rpartition(":")[2]))
        next_order()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--master", action="store_true")
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=["pccl"])
    parser.add_argument("--store", help="a file where Gloo's processes find each other")
    parser.add_argument("--device", default="lo", help="Gloo's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantize", choices=list(TOLERANCE))
    options = parser.parse_args()
    if options.master:
        serve()
        return
    host = Host(options)
    say("joined", rank=pccl.rank() if host.pccl else host.host)
    host.obey()


if __name__ == "__main__":
    main()
