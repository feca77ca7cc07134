"""After a fork the child's copies are inert, and the parent does not notice that there was one."""

import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from members import members
from programs import fork
from workers import command

import pccl

FORKS = 20


def _child(comm: pccl.Communicator, raises: bool) -> None:
    """The work of a forked child. Ends the process as Python programs end."""
    status = 1
    try:
        with pytest.raises(pccl.InvalidUsage):
            pccl.barrier(comm=comm)
        with pytest.raises(pccl.InvalidUsage):
            comm._engine.membership()
        comm._engine.close()  # the engine's own guard, below Python's
        del comm
        status = 0
        if raises:
            raise KeyError("an exception in the child")
    except KeyError:
        pass
    finally:
        os._exit(status)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_children_that_end_leave_the_parents_reductions_alone() -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    with members(2) as comms:
        counts = [0, 0]

        def reduce(index: int) -> None:
            try:
                while True:
                    more = np.array([0 if stop.is_set() else 1, 1], np.int64)
                    total = pccl.allreduce(more, "min", comm=comms[index])
                    assert total[1] == 1
                    assert pccl.world_size(comms[index]) == 2
                    counts[index] += 1
                    if total[0] == 0:
                        return
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=reduce, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for number in range(FORKS):
            child = os.fork()
            if child == 0:
                _child(comms[0], raises=number % 2 == 1)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert min(counts) > FORKS


def test_children_that_run_the_whole_exit_of_python_leave_the_run_alone(tmp_path: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        peers = [
            subprocess.Popen(
                command(fork.have_children_that_exit),
                env={**os.environ, "PCCL_MASTER": master.address},
                cwd=tmp_path,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(2)
        ]
        for peer in peers:
            _, errors = peer.communicate(timeout=200)
            assert peer.returncode == 0, errors


def test_a_child_that_lives_on_does_not_keep_its_dead_parents_connections(tmp_path: Path) -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        comm = pccl.Communicator(master.address)
        with subprocess.Popen(
            command(fork.die_before_the_child),
            env={**os.environ, "PCCL_MASTER": master.address},
            cwd=tmp_path,
            stdin=subprocess.PIPE,
        ) as other:
            comm._join("init", min_peers=2, attempts=5, timeout=30.0, enter=False)
            pccl.allreduce(np.ones(10), comm=comm)
            # Found out by broken connections, long before the silence of a heartbeat timeout.
            _, info = pccl.allreduce(np.ones(10), comm=comm, timeout=4.0, return_info=True)
            assert info.world_size == 1
            other.communicate(b"x")
        comm.close()
