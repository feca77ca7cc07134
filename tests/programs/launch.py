"""Ranks of `pccl run`. Most need no pccl, and do not load it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from types import FrameType


def print_threads() -> None:
    print(os.environ["OMP_NUM_THREADS"])


def print_settings() -> None:
    names = ("PCCL_MIN_PEERS", "PCCL_BIND", "PCCL_LOCAL_RANK", "PCCL_MASTER")
    print(*(os.environ[name] for name in names))


def connect_to_the_master() -> None:
    host, port = os.environ["PCCL_MASTER"].split(":")
    socket.create_connection((host, int(port)), 10).close()


def print_master_and_secret() -> None:
    print(os.environ["PCCL_MASTER"], os.environ["PCCL_SECRET"])


def print_whether_one_process_settings() -> None:
    print("PCCL_PORT" in os.environ or "PCCL_ADVERTISE" in os.environ)


def grow() -> None:
    """Lets others in until there are two."""
    import pccl

    with pccl.init():
        while pccl.world_size() < 2:
            pccl.admit()
        print("together", pccl.allreduce(1), flush=True)


def print_lines_in_two_parts() -> None:
    for i in range(2000):
        sys.stdout.write(f"{i} " + "x" * 50)
        sys.stdout.write("y" * 50 + "\n")


def print_a_long_line() -> None:
    print("z" * 300_000, end="")


def print_for_ever() -> None:
    while True:
        print("x" * 100)


def print_an_error() -> None:
    print("oh", file=sys.stderr)


def fail() -> None:
    raise SystemExit(9)


def fail_or_sleep(failing: int) -> None:
    """`failing`: the rank that fails."""
    if os.environ["PCCL_LOCAL_RANK"] == str(failing):
        sys.exit(7)
    sleep()


def fail_or_print(failing: int) -> None:
    if os.environ["PCCL_LOCAL_RANK"] == str(failing):
        sys.exit(7)
    print("done")


def fail_or_join(failing: int) -> None:
    if os.environ["PCCL_LOCAL_RANK"] == str(failing):
        sys.exit(7)
    import pccl

    pccl.init()


def wait_for_a_limit(open_files: int) -> None:
    """Ends once the limit of open files is that. The launcher sets it when the rank lives."""
    import resource

    while resource.getrlimit(resource.RLIMIT_NOFILE)[0] != open_files:
        time.sleep(0.01)
    print("it is")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_twice(folder: str) -> None:
    """Rank 0 fails in its first two lives. They are counted by files."""
    if os.environ["PCCL_LOCAL_RANK"] == "0":
        lives = len(os.listdir(folder))
        with open(os.path.join(folder, str(lives)), "w"):
            pass
        if lives < 2:
            sys.exit(7)
        print("lives again, with", os.environ["PCCL_MIN_PEERS"])
    else:
        print("done")


def train_and_die(folder: str) -> None:
    """Six steps together. Rank 1 dies in the third one, in its first life."""
    import pccl

    state = {"step": 0, "seen": 0}
    life = os.path.join(folder, "second")
    first = os.environ["PCCL_LOCAL_RANK"] == "1" and not os.path.exists(life)
    pccl.init()
    while True:
        if pccl.admit():
            state = pccl.sync(state)
        if state["step"] == 6:
            break
        if state["step"] == 3 and first:
            with open(life, "w"):
                pass
            os._exit(5)
        if state["step"] == 3 and os.environ["PCCL_LOCAL_RANK"] == "0":
            while not pccl.admit():  # until it is back
                pass
            state = pccl.sync(state)
        state["seen"] += pccl.allreduce(1)
        state["step"] += 1
    print("saw", state["seen"])


def train_without_end() -> None:
    import pccl

    pccl.init()
    said = False
    while True:
        pccl.admit()
        pccl.allreduce(1)
        if not said:
            print("ready", flush=True)
        said = True


def train_until_one_fails() -> None:
    """Has no admission point."""
    import pccl

    pccl.init()
    pccl.admit()
    for _ in range(3):
        pccl.allreduce(1)
    if os.environ["PCCL_LOCAL_RANK"] == "0":
        sys.exit(7)
    while True:
        pccl.allreduce(1)


def sleep() -> None:
    print("ready", flush=True)
    while True:  # not signal.pause(): the signal may come just before it
        time.sleep(0.05)


def ignore_signals() -> None:
    def ignore(number: int, frame: FrameType | None) -> None:
        print(signal.Signals(number).name, flush=True)

    signal.signal(signal.SIGINT, ignore)
    signal.signal(signal.SIGTERM, ignore)
    sleep()


def start_a_sleeper() -> None:
    child = subprocess.Popen([sys.executable, sys.argv[0], f"{__name__}:sleep", "[[], {}]"])
    child.wait()


def serve_in_place_of_stderr(path: str) -> None:
    """A master and a peer, while the descriptor of the standard error is a file of the program."""
    assert sys.stderr is None
    with open(path, "wb") as file:
        if file.fileno() != 2:
            os.dup2(file.fileno(), 2)
        import pccl

        with pccl.MasterNode("127.0.0.1:0") as master, pccl.init(master.address):
            print("shared", pccl.sync({"step": 1}))


def run_master() -> None:
    """Returns while its master serves."""
    import pccl

    master = pccl.MasterNode(listen_address="127.0.0.1:0")
    master.run()
    print(master.address, flush=True)


# ---- on other hosts


def sum_of_ones() -> None:
    import numpy as np

    import pccl

    with pccl.init():
        print(float(pccl.allreduce(np.ones(1))[0]))


def reduce_until_some_are_lost(ranks: int, left: int) -> None:
    """Prints its process between two steps of all ranks. Makes some steps with those left."""
    import pccl

    pccl.init()
    while pccl.allreduce(1) < ranks:
        pccl.admit()
    print("process", os.getpid(), flush=True)
    while pccl.allreduce(1) > left:
        pass
    print("then", *(pccl.allreduce(1) for _ in range(3)))
    pccl.shutdown()


def print_variables(*names: str) -> None:
    print("|".join([os.getcwd(), *(str(os.environ.get(name)) for name in names)]))


def find_secret_in_arguments() -> None:
    """Prints how many processes have the run's secret among their arguments."""
    secret = os.environ["PCCL_SECRET"].encode()
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                count += secret in file.read()
        except OSError:
            continue  # it has ended
    print(count)


def fail_at_two() -> None:
    if os.environ["PCCL_LOCAL_RANK"] == "2":
        sys.exit(3)
    sleep()


def tell_signals() -> None:
    """Ends at the first signal, and tells which one it was."""

    def tell(number: int, frame: FrameType | None) -> None:
        print(signal.Signals(number).name, flush=True)
        os._exit(0)

    signal.signal(signal.SIGINT, tell)
    signal.signal(signal.SIGTERM, tell)
    sleep()


def print_pid_and_wait() -> None:
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
