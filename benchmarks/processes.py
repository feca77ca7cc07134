"""What benchmarks/allreduce.py measures with, each a group of processes that this one starts and
ends: the ranks, the bare program, iperf3. All take their measurements in blocks of calls, so that
they can be interleaved."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pccl

FOLDER = Path(__file__).resolve().parent
GRACE = 10.0  # seconds in which what was told to end does so
START = 120.0  # seconds for starting


@dataclass
class Block:
    """Calls that followed each other."""

    seconds: list[list[float]]  # of each call, a list for each rank
    cpu: float  # seconds, of all ranks and the master
    master_cpu: float = 0.0


class Deadline:
    """A deadline for the processes that are started under it."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, most: float = 1e9) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise SystemExit("it takes too long; see --timeout")
        return min(left, most)


def have_gloo() -> bool:
    return importlib.util.find_spec("torch") is not None


def have_mpi() -> bool:
    """Open MPI and mpi4py. Others' mpirun takes other options."""
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return False
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True)
    return "Open MPI" in version.stdout


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process of ours, whatever it is doing."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


class Master:
    """A master in this process."""

    def __init__(self) -> None:
        self.node = pccl.MasterNode("127.0.0.1:0")
        self.node.run()
        self.address = self.node.address

    def cpu(self) -> float:
        """CPU seconds so far: its threads are all that is busy here, but for this one."""
        return time.process_time() - time.thread_time()

    def end(self) -> None:
        self.node.interrupt()


class OtherMaster:
    """A master in a process of its own, of another pccl.

    Args:
        environment: Where `import pccl` finds that one.
    """

    SCRIPT = """import pccl, sys
with pccl.MasterNode("127.0.0.1:0") as master:
    print(master.address, flush=True)
    sys.stdin.read()"""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SCRIPT],
            cwd="/",  # not where the sources are
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        if not self.address:
            raise SystemExit("the master did not start, see above")

    def cpu(self) -> float:
        """CPU seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        end(self.process)


class Ranks:
    """The ranks of one world, on one transport, and their master.

    With MPI mpirun starts them; without, this process does. All systems run in the same ranks.

    Args:
        settings: More variables for their environment. With PYTHONPATH the master has a process
            of its own: it is of the pccl that is there.
    """

    def __init__(
        self,
        world: int,
        tcp: bool,
        mpi: bool,
        gloo: bool,
        deadline: Deadline,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.world = world
        self.deadline = deadline
        self.processes: list[subprocess.Popen[bytes]] = []
        self.streams: list[socket.socket] = []
        self.origins: list[str] = []  # files of the pccl of each rank
        self.settings = dict(settings or {})
        self.master: Master | OtherMaster
        if "PYTHONPATH" in self.settings:
            self.master = OtherMaster(os.environ | self.settings)
        else:
            self.master = Master()
        try:
            self.start(tcp, mpi, gloo)
        except BaseException:
            self.end()
            raise

    def start(self, tcp: bool, mpi: bool, gloo: bool) -> None:
        environment = os.environ | {
            "PCCL_MASTER": self.master.address,
            "PCCL_MIN_PEERS": str(self.world),
            "PCCL_BIND": "127.0.0.1",
            "PCCL_SHM": "0" if tcp else "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **self.settings,
        }
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with (
            tempfile.TemporaryDirectory() as folder,
            tempfile.NamedTemporaryFile(dir=memory) as line,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{folder}/parent")
            listener.listen(self.world)
            os.truncate(line.name, 4096)
            command = [sys.executable, str(FOLDER / "ranks.py"), "--world", str(self.world)]
            command += ["--socket", f"{folder}/parent", "--line", line.name]
            if gloo:
                command += ["--gloo", f"{folder}/store"]
            if mpi:
                commands = [[*mpirun(self.world, tcp), *command, "--mpi"]]
            else:
                commands = [[*command, "--rank", str(rank)] for rank in range(self.world)]
            for command in commands:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
                )
            listener.settimeout(0.5)
            until = Deadline(self.deadline.left(START))
            while len(self.streams) < self.world:
                until.left()
                if any(process.poll() is not None for process in self.processes):
                    raise SystemExit(f"a rank of {self.world} did not start, see above")
                with suppress(TimeoutError):
                    self.streams.append(listener.accept()[0])
            answers = self.hear()
            ranks = [answer["rank"] for answer in answers]
            self.origins = [answer["pccl"] for answer in answers]
        self.streams = [self.streams[ranks.index(rank)] for rank in range(self.world)]

    def hear(self) -> list[dict[str, Any]]:
        """Returns the next line of each rank. Every order has one answer."""
        said = dict.fromkeys(self.streams, b"")
        while waiting := [stream for stream in said if not said[stream].endswith(b"\n")]:
            ready, _, _ = select.select(waiting, [], [], self.deadline.left())
            for stream in ready:
                data = stream.recv(1 << 20)
                if not data:
                    raise SystemExit(f"a rank of {self.world} ended, see above")
                said[stream] += data
        return [json.loads(said[stream]) for stream in self.streams]

    def order(self, order: str, **what: Any) -> None:
        for stream in self.streams:
            with suppress(BrokenPipeError):  # hear() says it
                stream.sendall(json.dumps({"order": order, **what}).encode() + b"\n")

    def prepare(self, cases: list[str], size: int) -> None:
        self.order("prepare", cases=cases, bytes=size)
        self.hear()

    def block(self, case: str, calls: int, paced: bool = True) -> Block:
        master = self.master.cpu()
        self.order("block", case=case, calls=calls, paced=paced)
        answers = self.hear()
        master = self.master.cpu() - master
        if case.endswith(("mpi", "gloo")):
            master = 0.0
        cpu = sum(answer["cpu"] for answer in answers) + master
        return Block([answer["seconds"] for answer in answers], cpu, master)

    def finish(self) -> None:
        """Lets them leave."""
        self.order("end")
        for process in self.processes:
            try:
                status = process.wait(self.deadline.left(START))
            except subprocess.TimeoutExpired:
                raise SystemExit(f"a rank of {self.world} does not end") from None
            if status:
                raise SystemExit(f"a rank of {self.world} failed in the end, see above")

    def end(self) -> None:
        for stream in self.streams:  # which ends the ranks
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for process in self.processes:
            end(process)
        for stream in self.streams:
            stream.close()
        self.master.end()


def mpirun(world: int, tcp: bool) -> list[str]:
    """Open MPI on this host alone, as fast as it goes: shared memory, or TCP over loopback."""
    settings = {
        "pml": "ob1",
        "btl": "self,tcp" if tcp else "^tcp",
        "btl_tcp_if_include": "lo",
        "oob_tcp_if_include": "lo",
        "mpi_yield_when_idle": str(int(world > len(os.sched_getaffinity(0)))),
    }
    command = ["mpirun", "-np", str(world), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    for name, value in settings.items():
        command += ["--mca", name, value]
    return command


def build_roofline() -> Path | None:
    """The bare program, compiled for this machine; None without a compiler."""
    source, program = FOLDER / "roofline.cpp", FOLDER.parent / "build" / "roofline"
    if program.exists() and program.stat().st_mtime > source.stat().st_mtime:
        return program
    compiler = os.environ.get("CXX") or shutil.which("c++") or ""
    if not shutil.which(compiler):
        return None
    program.parent.mkdir(exist_ok=True)
    flags = ["-std=c++20", "-O3", "-march=native", "-Wall", "-Wextra"]
    made = program.with_suffix(".new")
    subprocess.run([compiler, *flags, "-o", str(made), str(source)], check=True)
    made.replace(program)
    return program


class Roofline:
    """The bare program as a co-process: asleep while others are measured, and they while it is."""

    def __init__(self, program: Path, world: int, deadline: Deadline) -> None:
        self.deadline = deadline
        self.process = subprocess.Popen(
            [str(program), str(world)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, order: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        watchdog = threading.Timer(self.deadline.left(), self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise SystemExit("the bare program ended, see above")
        return json.loads(line)

    def prepare(self, size: int) -> None:
        self.ask(f"prepare {size}")

    def block(self, kind: str, calls: int) -> Block:
        ranks = self.ask(f"run {kind} {calls}")
        return Block([rank["seconds"] for rank in ranks], sum(rank["cpu"] for rank in ranks))

    def end(self) -> None:
        end(self.process)


def have_iperf() -> bool:
    return shutil.which("iperf3") is not None


def iperf(seconds: int) -> float:
    """Bytes per second of one TCP connection in each direction over loopback, both together."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    serving = subprocess.Popen(
        ["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port, "--forceflush"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        for line in serving.stdout:
            if "listening" in line:
                break
        client = ["iperf3", "-c", "127.0.0.1", "-p", port, "--bidir", "-t", str(seconds), "-J"]
        done = subprocess.run(client, capture_output=True, text=True, timeout=seconds + 30)
        report = json.loads(done.stdout)
        if "error" in report:
            raise SystemExit(f"iperf3: {report['error']}")
    finally:
        end(serving)
    received = (report["end"]["sum_received"], report["end"]["sum_received_bidir_reverse"])
    return sum(direction["bits_per_second"] for direction in received) / 8
