"""Runs of ElasticTrainer in a Ray of their own: python ray_runs.py NAME FOLDER

Each member leaves a file in the folder whose name has its name and process id. The run's result is
in result.json.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._common.test_utils import wait_for_condition
from ray.cluster_utils import Cluster

import pccl
from pccl.adapters.ray import ElasticTrainer
from pccl.adapters.ray.run import Run
from pccl.errors import MasterLost, Unreachable

FOLDER = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
AFTER = 5  # steps after what a run waits for
SECRET = "a secret of a test, which has enough characters"


def start(cpus: int, **more: Any) -> None:
    ray.init("local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **more)


def name() -> str:
    return os.environ["PCCL_NAME"]


def tell(folder: Path, word: str) -> None:
    """Writes to the pipe of that name, when somebody reads it."""
    (folder / word).write_text(word)


def each_step(over: Callable[[int], int], folder: Path) -> dict[str, Any]:
    """Trains until `over`, which gets the step, was not 0 anywhere for AFTER steps.

    Returns:
        The member's name, its process id, and its parameters, which began with other values.
    """
    (folder / f"{name()}.{os.getpid()}").touch()
    pccl.init()
    random = np.random.default_rng(os.getpid())
    state = {"step": 0, "over": 0, "w": random.standard_normal(1000).astype(np.float32)}
    while state["over"] < AFTER:
        if pccl.admit():
            state = pccl.sync(state, revision=state["step"])
        gradient = random.standard_normal(1000).astype(np.float32)
        state["w"] -= 0.1 * pccl.allreduce(gradient, op="avg")
        state["step"] += 1
        state["over"] += int(pccl.allreduce(np.int64(over(state["step"])), op="max"))
    return {"name": name(), "pid": os.getpid(), "w": state["w"].tobytes().hex()}


def commands() -> Iterator[str]:
    """The command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            yield path.read_text(errors="replace")


def killed(folder: Path) -> dict[str, Any]:
    """Member 1 is killed in step 20; all go on until its replacement has joined."""

    def over(step: int) -> int:
        if step == 10:
            assert os.environ["PCCL_SECRET"] == SECRET
            assert not any(SECRET in command for command in commands())
        if name() == "member-1" and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return name() == "member-1-1"

    return each_step(over, folder)


def run_killed() -> object:
    start(3)
    return ElasticTrainer(killed, FOLDER, members=3, min_members=3, secret=SECRET).fit()


def kicked(folder: Path) -> dict[str, Any]:
    """Member 1 is put out of the run in step 20, while its process lives."""

    def over(step: int) -> int:
        if name() == "member-0" and step == 20:
            subprocess.run([sys.executable, "-m", "pccl", "kick", "member-1"], check=True)
        return name() == "member-1-1"

    return each_step(over, folder)


def run_kicked() -> object:
    start(2)
    return ElasticTrainer(kicked, FOLDER, members=2, min_members=2).fit()


def grows(folder: Path) -> dict[str, Any]:
    """Two members ask for a place for the third, and for its end when it has come."""
    seen = []

    def over(step: int) -> int:
        size = pccl.world_size()
        if name() == "member-0" and (size == 2 and not seen or size == 3 and seen == [2]):
            seen.append(size)
            tell(folder, "more" if size == 2 else "fewer")
        return size == 2 and 3 in seen

    return each_step(over, folder)


def run_grows() -> object:
    """A third member has no place at first; a node comes with one, and is lost."""
    for word in ("more", "fewer"):
        os.mkfifo(FOLDER / word)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    ray.init(address=cluster.address)

    found: list[object] = []
    trainer = ElasticTrainer(grows, FOLDER, members=3, min_members=2)
    fitting = threading.Thread(target=lambda: found.extend(trainer.fit()))
    fitting.start()  # nodes are made in the main thread
    (FOLDER / "more").read_text()
    node = cluster.add_node(num_cpus=1)
    (FOLDER / "fewer").read_text()
    cluster.remove_node(node, allow_graceful=False)
    fitting.join()
    ray.shutdown()
    cluster.shutdown()
    return found


def wrong(config: object) -> None:
    pccl.init()
    if name() == "member-1":
        raise ValueError(f"no such {config}")
    pccl.barrier()
    threading.Event().wait()


def run_wrong() -> object:
    start(2)
    try:
        ElasticTrainer(wrong, "layer", members=2, min_members=2).fit()
    except ValueError as error:
        return str(error)
    return None


def dies(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_dies() -> object:
    start(2)
    try:
        ElasticTrainer(dies, members=2, max_failures=2).fit()
    except RuntimeError as error:
        return [str(error), str(error.__cause__)]
    return None


def goes_on(folder: Path) -> None:
    """Never ends by itself."""
    pccl.init()
    pccl.barrier()
    (folder / f"in-{os.environ['PCCL_LOCAL_RANK']}").write_text(str(os.getpid()))
    threading.Event().wait()


def run_interrupted() -> object:
    """Ctrl-C when both members are in. They end while Ray lives."""
    start(2)
    pipes = [FOLDER / f"in-{member}" for member in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    members: list[int] = []

    def interrupt() -> None:
        members.extend(os.pidfd_open(int(pipe.read_text())) for pipe in pipes)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        ElasticTrainer(goes_on, FOLDER, members=2, min_members=2).fit()
    except KeyboardInterrupt:
        thread.join()
        return [bool(select.select([member], [], [], 60)[0]) for member in members]
    return None


def loses_the_master(folder: Path) -> dict[str, Any]:
    """The master is killed in step 20, and both go on for as long again."""

    def over(step: int) -> int:
        if name() == "member-0" and step == 20:
            of_this_ray = ["ps", "-o", "pid=,args=", "--ppid", os.environ["RAY_RAYLET_PID"]]
            listed = subprocess.run(of_this_ray, check=True, capture_output=True, text=True).stdout
            (master,) = [line.split()[0] for line in listed.splitlines() if "::Master" in line]
            os.kill(int(master), signal.SIGKILL)
        return step > 40

    return each_step(over, folder)


def run_master() -> object:
    start(2)
    return ElasticTrainer(loses_the_master, FOLDER, members=2, min_members=2).fit()


def rejoins(folder: Path) -> dict[str, Any]:
    """Member 1 loses the master, and its replacement cannot be reached."""

    def over(step: int) -> int:
        if name() == "member-1" and step == 20:
            raise MasterLost.because("allreduce", "no answer")
        if name() == "member-1-1":
            raise Unreachable.because("allreduce", "no path")
        return name() == "member-1-2"

    return each_step(over, folder)


def run_rejoins() -> object:
    start(2)
    return ElasticTrainer(rejoins, FOLDER, members=2, min_members=2).fit()


def size(_: object) -> int:
    pccl.init()
    pccl.barrier()
    return pccl.world_size()


def nothing() -> None: ...


def starts_told() -> queue.SimpleQueue[int]:
    """Gets the number of each member that this process starts from now on."""
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    begin = Run.start

    def tells(run: Run, member: int) -> None:
        begin(run, member)
        told.put(member)

    Run.start = tells  # type: ignore[method-assign]
    return told


def run_starved() -> object:
    """The members that are needed have a place when a second node comes."""
    told = starts_told()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(address=cluster.address)
    found: list[object] = []
    trainer = ElasticTrainer(size, members=3, min_members=2)
    fitting = threading.Thread(target=lambda: found.extend(trainer.fit()), daemon=True)
    fitting.start()
    assert [told.get(), told.get()] == [0, 1]
    ray.get(ray.remote(nothing).remote())  # the first node's processor is free
    cluster.add_node(num_cpus=1)
    fitting.join()
    ray.shutdown()
    cluster.shutdown()
    return found


def starts_twice(folder: Path) -> int:
    """The first two members stay until their node is lost."""
    pccl.init()
    pccl.barrier()
    if name() in ("member-0", "member-1"):
        tell(folder, f"in-{name()}")
        threading.Event().wait()
    return pccl.world_size()


def run_again() -> object:
    """The node of all members is lost, and others come one after the other."""
    for member in range(2):
        os.mkfifo(FOLDER / f"in-member-{member}")
    told = starts_told()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    ray.init(address=cluster.address)
    node = cluster.add_node(num_cpus=2)
    found: list[object] = []
    trainer = ElasticTrainer(starts_twice, FOLDER, members=3, min_members=2)
    fitting = threading.Thread(target=lambda: found.extend(trainer.fit()), daemon=True)
    fitting.start()
    for member in range(2):
        (FOLDER / f"in-member-{member}").read_text()
    assert [told.get() for _ in range(3)] == [0, 1, 2]  # there is no place for the third
    cluster.remove_node(node, allow_graceful=False)
    again: set[int] = set()
    while not again >= {0, 1}:
        again.add(told.get())
    wait_for_condition(lambda: sum(each["Alive"] for each in ray.nodes()) == 1, timeout=60)
    cluster.add_node(num_cpus=1)
    ray.get(ray.remote(nothing).remote())  # its processor is free
    cluster.add_node(num_cpus=1)
    fitting.join()
    ray.shutdown()
    cluster.shutdown()
    return found


def waits(_: object) -> None:
    threading.Event().wait()


def run_memory() -> object:
    """Ray ends all actors, since the machine has less memory than it wants."""
    limits = {"memory_usage_threshold": 0.0001, "memory_monitor_refresh_ms": 100}
    start(2, _system_config=limits)
    try:
        ElasticTrainer(waits, members=2, max_failures=2).fit()
    except RuntimeError as error:
        return [str(error), type(error.__cause__).__name__]
    return None


def comes_late(folder: Path) -> str:
    """Member 1 dies, and its replacement comes when member 0 has left."""
    if name() == "member-1-1":
        (folder / "left").read_text()
    pccl.init(name=f"own-{name()}")
    pccl.barrier()
    if name() == "member-1":
        os.kill(os.getpid(), signal.SIGKILL)
    pccl.shutdown()
    tell(folder, "left")
    return name()


def run_late() -> object:
    os.mkfifo(FOLDER / "left")
    start(2)
    return ElasticTrainer(comes_late, FOLDER, members=2, min_members=2).fit()


def saves(folder: Path) -> str:
    """Member 1 still saves its state when member 0 has returned, and the group is empty."""
    pccl.init(name=f"own-{name()}")
    pccl.shutdown()
    if name() == "member-0":
        (folder / "left").read_text()
    else:
        tell(folder, "left")
        (folder / "looked").read_text()
    return name()


def run_saves() -> object:
    for word in ("left", "looked"):
        os.mkfifo(FOLDER / word)
    look = Run.end_the_waiting
    telling = threading.Thread(target=tell, args=(FOLDER, "looked"), daemon=True)

    def told(run: Run) -> None:
        look(run)
        if telling.ident is None:
            telling.start()

    Run.end_the_waiting = told  # type: ignore[method-assign]
    start(2)
    return ElasticTrainer(saves, FOLDER, members=2, min_members=2).fit()


class Unreadable(Exception):
    """Cannot be loaded elsewhere, since its class wants two arguments."""

    def __init__(self, left: str, right: str) -> None:
        super().__init__(left + right)


def raises_unreadable(_: object) -> None:
    raise Unreadable("no such ", "layer")


class Unloadable:
    """A value that only its own process has."""

    def __init__(self) -> None:
        self.at = os.getpid()

    def __setstate__(self, state: dict[str, int]) -> None:
        if state["at"] != os.getpid():
            raise ValueError("a value of another process")


def returns_unloadable(_: object) -> Unloadable:
    return Unloadable()


def run_unreadable() -> object:
    """An error or a value that this process cannot load is no death."""
    start(1)
    found = []
    for train in (raises_unreadable, returns_unloadable):
        try:
            ElasticTrainer(train, members=1).fit()
        except ray.exceptions.RayError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def leaves(folder: Path) -> dict[str, Any]:
    """Member 1 leaves on purpose in step 20."""

    def over(step: int) -> int:
        if name() == "member-1" and step == 20:
            pccl.drain()
        return pccl.world_size() == 1

    return each_step(over, folder)


def run_leaves() -> object:
    start(2)
    return ElasticTrainer(leaves, FOLDER, members=2, min_members=2).fit()


def main() -> None:
    (FOLDER / "result.json").write_text(json.dumps(globals()[f"run_{sys.argv[1]}"]()))


if __name__ == "__main__":
    main()
