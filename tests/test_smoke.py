"""Several communicators in one process: the quickest check that reductions work at all."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from members import Members, in_threads, results

import pccl


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_are_exact_and_bytes_are_equal(members: Members, world: int) -> None:
    comms = members(world)
    for count in (0, 1, 7, 1000, 300_001):
        inputs = [
            np.random.default_rng(index).integers(-1000, 1000, count).astype(np.float32)
            for index in range(world)
        ]
        outputs = results(
            comms, lambda rank, comm, inputs=inputs: pccl.allreduce(inputs[rank], comm=comm)
        )
        for output in outputs:
            np.testing.assert_array_equal(output, np.sum(inputs, axis=0))


def test_in_place_overwrites_the_input(members: Members) -> None:
    def body(rank: int, comm: pccl.Communicator) -> object:
        array = np.full(100_000, rank + 1, np.int64)
        assert pccl.allreduce(array, out=array, comm=comm) is array
        return array

    for array in results(members(3), body):
        assert np.all(array == 6)


def test_tagged_calls_meet_in_any_order_from_any_thread(members: Members) -> None:
    def body(rank: int, comm: pccl.Communicator) -> object:
        tags = list(range(8))
        np.random.default_rng(rank).shuffle(tags)

        def reduce(tag: int) -> object:
            return pccl.allreduce(np.full(5000, tag + rank), tag=tag, comm=comm)

        return dict(zip(tags, in_threads([partial(reduce, tag) for tag in tags]), strict=True))

    for sums in results(members(3), body):
        assert {tag: int(total[0]) for tag, total in sums.items()} == {
            tag: 3 * tag + 3 for tag in range(8)
        }


def test_barriers_and_reductions_alternate(members: Members) -> None:
    def body(rank: int, comm: pccl.Communicator) -> object:
        total = 0
        for step in range(50):
            pccl.barrier(comm=comm)
            total += int(pccl.allreduce(np.array([step]), comm=comm)[0])
        return total

    assert results(members(4), body) == [4 * sum(range(50))] * 4


def test_the_first_admission_point_is_passed_at_once_and_the_next_ones_cost_nothing(
    members: Members,
) -> None:
    def body(rank: int, comm: pccl.Communicator) -> object:
        first = pccl.admit(comm=comm)
        pccl.allreduce(np.ones(10), comm=comm)
        again = pccl.admit(comm=comm)
        pccl.barrier(comm=comm)  # so that nobody has left when the others look
        return first, again, pccl.rank(comm), pccl.world_size(comm)

    answers = results(members(3), body)
    assert sorted(rank for _, _, rank, _ in answers) == [0, 1, 2]
    assert all((first, again, world) == (True, False, 3) for first, again, _, world in answers)


def test_close_ends_another_threads_connect() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as thread:
        comm = pccl.Communicator(f"127.0.0.1:{mute.getsockname()[1]}")
        connecting = thread.submit(comm.connect)
        with mute.accept()[0]:
            comm.close()
            with pytest.raises(pccl.InvalidUsage, match="closed"):
                connecting.result(2)


def test_close_ends_other_threads_calls(members: Members) -> None:
    def body(rank: int, comm: pccl.Communicator) -> object:
        pccl.barrier(comm=comm)
        if rank == 1:
            pccl.barrier(comm=comm)  # of a group of one, once the other has closed
            return True
        work = pccl.allreduce_async(np.ones(10), tag=1, comm=comm)
        caught = []

        def wait() -> None:
            try:
                work.wait()
            except pccl.PCCLError as error:
                caught.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        comm.close()
        waiter.join()
        assert len(caught) == 1 and isinstance(caught[0], pccl.InvalidUsage)
        return True

    assert results(members(2), body) == [True, True]


def test_a_master_frees_its_port_when_it_is_interrupted() -> None:
    with pccl.MasterNode("127.0.0.1:0") as first:
        address = first.address
        comm = pccl.Communicator(address)
        comm.connect()
    with pccl.MasterNode(address) as second:
        assert second.address == address
    comm.close()


@pytest.mark.parametrize("listen", ["nonsense:port", "127.0.0.1:70000", "1:2:3", "[::1"])
def test_addresses_that_make_no_sense_are_refused(listen: str) -> None:
    with pytest.raises(pccl.InvalidArgument):
        pccl.MasterNode(listen).run()
