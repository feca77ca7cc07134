"""The batch scripts of deploy/slurm/, with a controller and a node of SLURM on this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from programs import cluster, launch
from workers import command, eventually, free_ports

soon = partial(eventually, seconds=60)

SCRIPTS = Path(__file__).resolve().parent.parent / "deploy" / "slurm"
# Eight processors, whatever the machine has. Jobs of "high" take those of "low", after a notice.
SETTINGS = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_res
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=localhost PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A cluster of one node, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        settings = folder / "slurm.conf"
        settings.write_text(SETTINGS.format(ports=free_ports(2), folder=folder))
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if "PCCL_" not in name}
        self.env = {
            **kept,
            "SLURM_CONF": str(settings),
            "PATH": tools,
            "RUN_FOLDER": str(folder / "run"),
            "LISTEN": "127.0.0.1:0",
            "PCCL_BIND": "127.0.0.1",
        }
        self.log = (folder / "log").open("wb")
        self.daemons = [
            subprocess.Popen(
                [shutil.which(words[0]) or f"/usr/sbin/{words[0]}", "-D", *words[1:]],
                env=self.env,
                stdout=self.log,
                stderr=self.log,
                start_new_session=True,
            )
            for words in (["slurmctld"], ["slurmd", "-N", "localhost"])
        ]

    def is_up(self) -> bool:
        if any(daemon.poll() is not None for daemon in self.daemons):
            self.refuse()
        said = subprocess.run(
            ["sinfo", "-h", "-p", "low", "-o", "%T"], env=self.env, capture_output=True, text=True
        )
        return said.stdout.strip() == "idle"

    def refuse(self) -> NoReturn:
        """Skips the test: a daemon ended, or the node is not what the controller wants."""
        pytest.skip("SLURM does not run here: " + (self.folder / "log").read_text()[-500:])

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, cwd=self.folder)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, name: str, *words: str) -> str:
        """The number of the new job, whose output is in a file of that name."""
        return self.run("sbatch", "--parsable", "--output", str(self.folder / name), *words)

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", self.run("scontrol", "show", "job", "-o", job))
        assert found
        return found[1]

    def output(self, name: str) -> str:
        file = self.folder / name
        return file.read_text() if file.exists() else ""

    def start_soon(self, job: str) -> None:
        """A job that was requeued would wait for two minutes.

        The node refuses what was allowed in the second in which the job was killed, or before.
        """
        soon(lambda: self.state(job) == "PENDING")
        self.run("scontrol", "update", f"jobid={job}", "starttime=now+2")

    def close(self) -> None:
        if all(daemon.poll() is None for daemon in self.daemons):
            subprocess.run(["scancel", "-u", "root"], env=self.env, check=False)
            soon(lambda: self.run("squeue", "-h") == "")
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(60)
        self.log.close()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("only root starts a node of SLURM")
    for program in ("slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
            pytest.skip(f"needs {program}")
    made = Slurm(tmp_path)
    try:
        with suppress(AssertionError):
            soon(made.is_up)
        if not made.is_up():
            made.refuse()
        yield made
    finally:
        made.close()


@pytest.mark.timeout(300)
def test_peers_that_are_killed_requeued_or_preempted_come_back(slurm: Slurm) -> None:
    stop = slurm.folder / "stop"
    master = slurm.submit("master", "-p", "high", "--mem=0", str(SCRIPTS / "master.sbatch"))
    program = command(partial(cluster.step_until, str(stop)))
    array = slurm.submit("peer-%a", "--array=0-2", str(SCRIPTS / "peers.sbatch"), *program)
    jobs = [f"{array}_{number}" for number in range(3)]
    begun = [1, 1, 1]  # how often each program

    def processes(number: int) -> list[int]:
        return [int(one) for one in re.findall(r"process (\d+)", slurm.output(f"peer-{number}"))]

    def all_step(members: int, among: range = range(3)) -> Callable[[], bool]:
        def step() -> bool:
            said = [slurm.output(f"peer-{number}").rstrip().splitlines() for number in among]
            lasts = [lines[-1] if lines else "" for lines in said]
            numbers = [len(processes(number)) for number in among]
            return numbers == [begun[number] for number in among] and all(
                re.fullmatch(rf"step \d+ of {members}", last) for last in lasts
            )

        return step

    soon(all_step(3))
    # A program that crashes begins again in its job.
    os.kill(processes(0)[-1], signal.SIGKILL)
    begun[0] += 1
    soon(all_step(3))
    assert "the program ended with status 137; again in 5 s" in slurm.output("peer-0")
    # An operator requeues a job, and the time limit of another one comes near.
    for number, words in ((1, ["scontrol", "requeue"]), (2, ["scancel", "--batch", "-s", "USR1"])):
        slurm.run(*words, jobs[number])
        slurm.start_soon(jobs[number])
        begun[number] += 1
        soon(all_step(3))
    # A job of higher priority needs the place of one of them, which leaves and comes back.
    first = slurm.submit("first", "-p", "high", "--ntasks=5", "--wrap", "echo first")
    soon(lambda: slurm.output("first") == "first\n")
    (victim,) = [number for number in range(3) if slurm.state(jobs[number]) == "PENDING"]
    slurm.start_soon(jobs[victim])
    begun[victim] += 1
    soon(all_step(3))
    assert slurm.state(first) == "COMPLETED"
    # One that is cancelled does not come back.
    slurm.run("scancel", jobs[0])
    soon(lambda: slurm.state(jobs[0]) == "CANCELLED")
    soon(all_step(2, range(1, 3)))
    stop.touch()
    for number in (1, 2):
        soon(lambda job=jobs[number]: slurm.state(job) == "COMPLETED")  # type: ignore[misc]
    assert len(re.findall("is out: it left", slurm.output("master"))) >= 4
    slurm.run("scancel", master)


@pytest.mark.timeout(300)
def test_one_job_has_the_master_and_all_peers(slurm: Slurm) -> None:
    script = str(SCRIPTS / "job.sbatch")
    job = slurm.submit("job", "--ntasks=3", script, *command(launch.sum_of_ones))
    soon(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    said = slurm.output("job")
    assert slurm.state(job) == "COMPLETED", said
    assert sorted(re.findall(r"^\d: 3\.0$", said, re.MULTILINE)) == ["0: 3.0", "1: 3.0", "2: 3.0"]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_script_is_what_bash_reads(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
