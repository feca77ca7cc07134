"""`pccl run`: a program as several peers on this machine, with a master on loopback or others'."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from pccl import _core, _settings
from pccl.communicator import MasterNode
from pccl.departure import drain_seconds
from pccl.errors import PCCLError
from pccl.master import make_secret
from pccl.tools import descriptors, screen
from pccl.tools.output import Outputs
from pccl.tools.parsing import Misuse
from pccl.tools.status import Status, Unreadable, read

__all__ = [
    "MAX_RANKS",
    "ONE_PROCESS",
    "Launch",
    "Plan",
    "check_program",
    "launch",
    "rank_environment",
    "resolve",
]

MAX_RANKS = 4096
# Settings that belong to one process.
_OWN_PORT = ("PCCL_PORT", "PCCL_ADVERTISE")
# The same, and those that a run makes for itself.
ONE_PROCESS = (*_OWN_PORT, "PCCL_SECRET_FILE", "PCCL_STANDBY")

_GRACE_SECONDS = 5.0  # between SIGINT, SIGTERM and SIGKILL
# Between two SIGTERMs: the first one asks a program of the simple API to leave, the second to end.
_HURRY_SECONDS = 1.0
_RESTART_SECONDS = (1.0, 30.0)  # before the first restart of a rank; doubled each time, up to this
_START_SECONDS = 1.0  # between two looks whether the group can still start
_DRAIN_SECONDS = 2.0  # for output after a rank's end, when a process it left behind holds the pipe
_READ_BYTES = 1 << 16
_MOST_LEFT_BYTES = 2 << 20  # more than a pipe holds, and what was read of it
_MAX_LINE_BYTES = 1 << 20  # a longer line is written in pieces
_FAILED_TO_START = 127


def _usable_cores() -> int:
    """Cores that this process may use. Not every system can give it fewer than all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(base: Mapping[str, str], ranks: int) -> dict[str, str]:
    """`base` for `ranks` processes of this machine."""
    made = {**base, "PYTHONUNBUFFERED": "1"}
    # NumPy and torch start a thread for each core by default. More threads than cores, of ranks
    # that wait for each other, slow small steps down by a factor of ten and more.
    made.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // ranks)))
    return made


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    elastic: bool = False,
    restarts: int = 0,
    show_join: bool = False,
    join: str | None = None,
) -> int:
    """Runs `command` as `ranks` processes and waits for them. Call it from the main thread.

    Args:
        command: The program and its arguments. "python" means this interpreter when there is no
            such program, and so does a file that ends with .py and cannot be executed.
        ranks: Number of processes.
        elastic: Go on without ranks that fail, while at least one lives. Otherwise the first
            failure stops all, and so does one without which the group cannot start.
        restarts: How often each rank that fails is started again, as a newcomer. A rank that fails
            once more counts as failed.
        show_join: Print the line to join with from another terminal, with the run's secret.
            Otherwise print the master's address and how to get that line.
        join: Addresses of the masters of a run, as in PCCL_MASTER, which the processes join. The
            secret and everything else come from this process's environment. Default: begin a run.

    Returns:
        The exit status: 0; else the first failing rank's (128 + n for signal n), with `elastic`
        only when no rank succeeded; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        PCCLError: The master could not be started.
    """
    drain = drain_seconds("run")
    plan = Plan(ranks, elastic, restarts, _GRACE_SECONDS, drain, peers=0 if join else ranks)
    if join is not None:
        base = {k: v for k, v in os.environ.items() if k not in _OWN_PORT} | {"PCCL_MASTER": join}
        return _launch(command, base, plan)
    secret = make_secret()  # other users of this machine reach the port, too
    with MasterNode("127.0.0.1:0", secret=secret) as master:
        base = {k: v for k, v in os.environ.items() if k not in ONE_PROCESS}
        base |= {
            "PCCL_MASTER": master.address,
            "PCCL_SECRET": secret,
            "PCCL_MIN_PEERS": str(ranks),
            "PCCL_BIND": "127.0.0.1",
        }
        Launch.say_how_to_join(base, command, show_join)
        return _launch(command, base, plan)


def _launch(command: Sequence[str], environment: Mapping[str, str], plan: Plan) -> int:
    base = rank_environment(environment, plan.ranks)
    # The ranks write to a pipe, but somebody may look at what comes out of it.
    if screen.is_terminal(sys.stderr):
        base.setdefault("PCCL_LOG_FORMAT", "short")
    if (shown := screen.console(sys.stdout)) is not None:
        base.setdefault("COLUMNS", str(max(20, shown.width - len(f"[{plan.ranks - 1}] "))))
    return asyncio.run(Launch(resolve(command), base, plan).run())


def check_program(command: Sequence[str]) -> None:
    """Finds out before anything is started whether there is such a program.

    Raises:
        Misuse: There is none, or Python would not find its script.
    """
    program, *arguments = resolve(command)
    found = shutil.which(program)
    if found is None and os.path.isdir(program):
        raise Misuse(f"{program} is a folder; give a program or a script")
    if found is None and os.path.isfile(program) and os.sep in program:
        raise Misuse(f"{program} is not executable; run `chmod +x {program}`")
    if found is None and os.path.isfile(program):
        raise Misuse(f"{program} is not on the PATH; write ./{program} to run it from here")
    if found is None:
        kind = "script" if program.endswith(".py") else "program"
        raise Misuse(f"there is no {kind} {shlex.quote(program)}; correct its name or its path")
    if os.path.basename(program).startswith("python"):
        script = _script(arguments)
        if script and not os.path.exists(script):
            raise Misuse(f"there is no script {script}; correct its path (here is {os.getcwd()})")


def _script(arguments: Sequence[str]) -> str | None:
    """The script that Python would run with these arguments."""
    words = iter(arguments)
    for word in words:
        if word == "--":
            return next(words, None)
        if word == "-" or not word.startswith("-"):
            return None if word == "-" else word
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        # Options may share a word; one with a value is the last, as in -Bum PACKAGE.
        valued = next((at for at, letter in enumerate(word) if letter in "cmWX"), None)
        if valued is not None and word[valued] in "cm":
            return None
        if valued == len(word) - 1:
            next(words, None)
    return None


def resolve(command: Sequence[str]) -> list[str]:
    program = command[0]
    if program in ("python", "python3") and shutil.which(program) is None:
        return [sys.executable, *command[1:]]
    if program.endswith(".py") and os.path.isfile(program) and not os.access(program, os.X_OK):
        return [sys.executable, *command]
    return list(command)


def _status(code: int) -> int:
    """A shell's status for asyncio's return code, which is -n for signal n."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class Plan:
    """What `launch` was told. Times in seconds."""

    ranks: int
    elastic: bool
    restarts: int
    grace: float
    drain: float
    first: int = 0  # the number of the first rank
    peers: int = 0  # of the whole run, which begins with all of them; 0: it is others' run


class Launch:
    """The processes of one run on this machine. Lives in one event loop."""

    def __init__(self, command: list[str], environment: dict[str, str], plan: Plan) -> None:
        self._command = command
        self._environment = environment
        self._plan = plan
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # the latest of each rank
        self._restarts = Counter[int]()  # of each rank
        self._left = plan.peers  # those of the run that have not ended, as far as we know
        self._readers: list[asyncio.Future[None]] = []
        self._signals: asyncio.Queue[int] = asyncio.Queue()  # for us, or SIGPIPE: output closed
        self._told = False  # to end, by a signal
        self._ended = asyncio.Event()  # all ranks

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._outputs = Outputs(self._on_lost_output)
        with ExitStack() as undo:
            undo.callback(self._outputs.close)
            ranks = range(self._plan.first, self._plan.first + self._plan.ranks)
            connected = sum(map(self._peers, ranks))
            self._former_limits = undo.enter_context(descriptors.enough_for(connected))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    loop.add_signal_handler(number, self._signals.put_nowait, number)
                    undo.callback(loop.remove_signal_handler, number)
            undo.callback(self._kill_all)
            try:
                for rank in ranks:
                    await self._start(rank, {})
            except OSError as error:
                self._say(self._cannot_run(error))
                self._kill_all()
                return await self._drain(_FAILED_TO_START)
            return await self._drain(await self._supervise())

    async def _start(self, rank: int, more: Mapping[str, str]) -> None:
        # Not asyncio's pipes: with these, waiting for a process may also wait for others that
        # inherited its output.
        out = await self._pipe(rank, sys.stdout.buffer)
        err = await self._pipe(rank, sys.stderr.buffer)
        try:
            self._processes[rank] = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment | {"PCCL_LOCAL_RANK": str(rank)} | dict(more),
                start_new_session=True,  # a group of its own: the terminal's Ctrl-C reaches only us
            )
            descriptors.give_back(self._former_limits, self._processes[rank].pid)
        finally:
            os.close(out)
            os.close(err)

    async def _start_again(self, rank: int, delay: float) -> int:
        """Starts a rank after a pause, and returns how it ended."""
        await asyncio.sleep(delay)
        try:
            # The others may have ended by then: it must not wait for them.
            await self._start(rank, {"PCCL_MIN_PEERS": "1"})
        except OSError as error:
            self._say(self._cannot_run(error))
            return _FAILED_TO_START
        return await self._processes[rank].wait()

    def _cannot_run(self, error: OSError) -> str:
        return f"cannot run {self._command[0]}: {error.strerror}"

    async def _pipe(self, rank: int, sink: BinaryIO) -> int:
        """The writing end of a pipe whose lines are forwarded to `sink`."""
        reading, writing = os.pipe()
        stream = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reading, "rb", 0)
        )
        self._readers.append(asyncio.ensure_future(self._forward(rank, stream, sink)))
        return writing

    async def _supervise(self) -> int:
        """Waits for the ranks, or for a reason to stop them. Returns the status."""
        succeeded, failure = False, 0
        told = asyncio.ensure_future(self._signals.get())
        never = asyncio.get_running_loop().create_future()
        hopeless: asyncio.Future[str] = never  # since a failure: a task
        running: dict[asyncio.Future[int], int] = {
            asyncio.ensure_future(process.wait()): rank for rank, process in self._processes.items()
        }
        try:
            while running:
                finished = await _first({*running, told, hopeless})
                for future in [f for f in running if f in finished]:
                    rank, code = running.pop(future), future.result()
                    if code == 0:
                        succeeded = True
                        self._left -= self._peers(rank)
                        continue
                    if told not in finished and self._restarts[rank] < self._plan.restarts:
                        running[self._restart(rank, code)] = rank
                        continue
                    failure = failure or _status(code)
                    self._left -= self._peers(rank)
                    self._say(f"{self._name(rank)} {_ending(code)}{self._then(len(running))}")
                    if running and not self._plan.elastic:
                        self._told = self._told or told in finished
                        told.cancel()  # from now on a signal means hurry
                        await self._stop(running, self._hurried_steps())
                        return failure
                    if self._plan.peers and hopeless is never:
                        hopeless = asyncio.ensure_future(self._watch_start())
                if told in finished:
                    self._told = True
                    await self._stop(running, self._steps(told.result()))
                    return 128 + told.result()
                if hopeless in finished:
                    if why := hopeless.result():
                        self._say(f"{why}; stopping the others")
                        told.cancel()
                        await self._stop(running, self._hurried_steps())
                        return failure
                    hopeless = never
        finally:
            told.cancel()
            hopeless.cancel()
        return 0 if self._plan.elastic and succeeded else failure

    async def _watch_start(self) -> str:
        """Why the run's group will never start, once this is so. "": it has started."""
        master = self._environment["PCCL_MASTER"]
        secret = _settings.secret(self._environment["PCCL_SECRET"], "run")
        while True:
            try:
                status = read(await asyncio.to_thread(_core.ask_status, master, secret))
            except (PCCLError, Unreadable):
                status = Status()  # the next answer may be better
            if any(group.members for group in status.groups):
                return ""
            for group in status.groups:
                # Some may come from elsewhere: more than we know, if it waits for more than ours.
                most = max(self._left, len(group.newcomers))
                if most < group.min_peers <= self._plan.peers:
                    return (
                        f"the run cannot start: it waits for {group.min_peers} peers, and no more "
                        f"than {most} can come"
                    )
            await asyncio.sleep(_START_SECONDS)

    def _peers(self, rank: int) -> int:
        """Peers of the run that are gone with that rank."""
        return 1

    def _hurried_steps(self) -> list[tuple[int, float]]:
        return [(signal.SIGTERM, _HURRY_SECONDS), (signal.SIGTERM, self._plan.grace)]

    def _steps(self, number: int) -> list[tuple[int, float]]:
        """The signals for the ranks that follow from one for us, each with its seconds to end."""
        grace = self._plan.grace
        if number == signal.SIGINT:
            return [(signal.SIGINT, grace), (signal.SIGTERM, grace)]
        return [(signal.SIGTERM, self._plan.drain + grace), (signal.SIGTERM, grace)]

    def _restart(self, rank: int, code: int) -> asyncio.Future[int]:
        delay = _pause(self._restarts[rank])
        self._restarts[rank] += 1
        again = (
            f"starting it again in {delay:g} s ({self._restarts[rank]} of {self._plan.restarts})"
        )
        self._say(f"{self._name(rank)} {_ending(code)}; {again}")
        return asyncio.ensure_future(self._start_again(rank, delay))

    def _name(self, rank: int) -> str:
        return f"rank {rank}"

    def _then(self, running: int) -> str:
        if not running:
            return ""
        if self._plan.elastic:
            return f"; {running} of {self._plan.ranks} go on"
        return "; stopping the others"

    async def _stop(
        self, running: Mapping[asyncio.Future[int], int], steps: Sequence[tuple[int, float]]
    ) -> None:
        """Signals the ranks, step by step, and kills them at last.

        Another signal for us takes the next step at once.
        """
        waited = []
        for future, rank in running.items():
            if self._processes[rank].returncode is None:
                waited.append(future)
            else:
                future.cancel()  # it is about to be started again
        for number, seconds in [*steps, (signal.SIGKILL, None)]:
            if not waited:
                return
            for process in self._processes.values():
                if process.returncode is None:
                    self._signal(process, number)
            hurry = asyncio.ensure_future(self._signals.get())
            ended = asyncio.ensure_future(asyncio.wait(waited))
            await asyncio.wait({hurry, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if hurry.done() and hurry.result() != signal.SIGPIPE:
                self._told = True
            hurry.cancel()
            if ended.done():
                return
            ended.cancel()
        await asyncio.wait(waited)

    def _signal(self, process: asyncio.subprocess.Process, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)

    def _kill_all(self) -> None:
        """Kills ranks that still run, so that none outlives its launcher."""
        for process in self._processes.values():
            if process.returncode is None:
                self._signal(process, signal.SIGKILL)

    async def _drain(self, status: int) -> int:
        """Waits for the rest of the output, but not for processes that a rank left behind.

        Its reader may take as long as it likes, until a signal for us.
        """
        self._ended.set()
        if self._readers:
            _, unfinished = await asyncio.wait(self._readers, timeout=_DRAIN_SECONDS)
            for reader in unfinished:
                reader.cancel()
        written = asyncio.gather(*self._outputs.written())
        if not self._told:
            told = asyncio.ensure_future(self._signals.get())
            await _first({told, written})
            if not written.done() and told.result() != signal.SIGPIPE:
                status = 128 + told.result()
            told.cancel()
        await asyncio.wait({written}, timeout=_DRAIN_SECONDS)
        return status

    async def _forward(self, rank: int, source: asyncio.StreamReader, sink: BinaryIO) -> None:
        """Copies whole lines, each prefixed by the rank."""
        prefix = self._prefix(rank, sink)
        rest, left = b"", _MOST_LEFT_BYTES
        ended = asyncio.ensure_future(self._ended.wait())
        while left > 0 and (data := await source.read(_READ_BYTES)):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            written = self._write(sink, prefix, lines)
            if self._ended.is_set():
                left -= len(data)
            else:
                await _first({written, ended})
        if rest:
            self._write(sink, prefix, [rest])
        ended.cancel()

    def _prefix(self, rank: int, sink: BinaryIO) -> bytes:
        return f"{screen.paint(f'[{rank}]', rank, sink)} ".encode()

    def _write(self, sink: BinaryIO, prefix: bytes, lines: list[bytes]) -> asyncio.Future[None]:
        data = b"".join(prefix + line + b"\n" for line in lines)
        return self._outputs.write(sink.fileno(), data)

    def _on_lost_output(self, error: OSError) -> None:
        """E.g. our reader was `head`: stops the ranks, reading on."""
        if not isinstance(error, BrokenPipeError):
            self._say(f"cannot write the output: {error.strerror}; stopping the ranks")
        self._signals.put_nowait(signal.SIGPIPE)

    def _say(self, text: str) -> None:
        """As `say`, without waiting for the reader."""
        self._outputs.write(sys.stderr.fileno(), screen.noted("pccl run", text))

    @classmethod
    def say_how_to_join(
        cls, environment: Mapping[str, str], command: Sequence[str], show_secret: bool
    ) -> None:
        line = f"to join: PCCL_MASTER={environment['PCCL_MASTER']} "
        if show_secret:
            line += f"PCCL_SECRET={environment['PCCL_SECRET']} {shlex.join(command)}"
        else:
            line += "and the secret (pccl run --show-join prints it)"
        cls.say(line)

    @staticmethod
    def say(text: str) -> None:
        screen.note("pccl run", text)


async def _first(futures: set[asyncio.Future[Any]]) -> set[asyncio.Future[Any]]:
    """Waits until one of them is done. Returns those that are."""
    done: set[asyncio.Future[Any]]
    done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    return done


def _pause(restarts: int) -> float:
    """Seconds before the next restart."""
    first, most = _RESTART_SECONDS
    return min(first * (1 << min(restarts, 10)), most)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
