"""Peers that make every call of pccl.h. `number` tells those of one test apart: 0, 1, ..."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any

import numpy as np

import pccl
from programs.capi import (
    DTYPES,
    OPS,
    RESULTS,
    Address,
    AsyncOp,
    BuildInfo,
    CreateParams,
    Failed,
    Peer,
    ReduceInfo,
    State,
    check,
    describe,
    fails,
    last_error,
    lib,
    resolve,
)
from programs.peer import hear, say


def connect() -> Peer:
    """Joins the run as a C peer."""
    peer = Peer()
    say(event="connected")
    return peer


def reduce_with_named_masters(address: str) -> None:
    """`address` is one of the masters, whose names PCCL_MASTER lists. Reduces when told to."""
    peer = Peer(address)
    say(event="connected")
    peer.gather(2)
    x = np.ones(1000, np.float32)
    while hear():
        y = np.empty_like(x)
        assert peer.reduce(x, y).local_world_size == 2
        assert (y == 2).all()
        say(event="reduced")
    say(event="ok")


def make_calls_too_early() -> None:
    """Makes every call with NULL, uninitialised and unconnected."""
    assert last_error() == ""
    comm = c_void_p()
    assert RESULTS[lib.pcclCreateCommunicator(None, byref(comm))] == "NotInitialized"
    assert last_error().startswith("pcclCreateCommunicator failed with pcclNotInitialized: ")
    check(lib.pcclInit())
    check(lib.pcclInit())
    master = resolve("127.0.0.1:1")
    for name in (
        "CreateCommunicator GetAttribute DestroyCommunicator Connect UpdateTopology "
        "ArePeersPending OptimizeTopology AllReduce AllReduceAsync AwaitAsyncReduce "
        "AllReduceMultipleWithRetry SynchronizeSharedState RunMaster InterruptMaster "
        "MasterAwaitTermination DestroyMaster GetBuildInfo ResolveAddress GetMasterAddress"
    ).split():
        function = getattr(lib, "pccl" + name)
        nothing = [0 if kind in (c_int, c_size_t) else None for kind in function.argtypes]
        assert RESULTS[function(*nothing)] == "InvalidArgument", name
        assert last_error().startswith(f"pccl{name} failed with pcclInvalidArgument: "), (
            last_error()
        )
        assert "NULL" in last_error()
    with fails("InvalidArgument", "master_out is NULL"):
        check(lib.pcclCreateMaster(master, None))
    with fails("InvalidArgument", "comm_out is NULL"):
        check(lib.pcclCreateCommunicator(byref(CreateParams(master, 0, 0)), None))
    with fails("InvalidArgument", "port"):
        Peer("127.0.0.1:0", connect=False)
    master.inet.protocol = 7
    with fails("InvalidArgument", "inetIPv4"):
        check(lib.pcclCreateCommunicator(byref(CreateParams(master, 0, 0)), byref(comm)))
    with fails("InvalidArgument", "peer_group is more than 2147483647"):
        params = CreateParams(resolve("[::1]:1"), 2**31, 0)
        check(lib.pcclCreateCommunicator(byref(params), byref(comm)))
    with fails("InvalidArgument", "255"):
        check(
            lib.pcclCreateCommunicator(byref(CreateParams(resolve("[::1]:1"), 0, 257)), byref(comm))
        )

    peer = Peer(connect=False)
    array, state = np.ones(10), State(x=np.ones(10))
    for call in (
        peer.update_topology,
        peer.attribute,
        peer.peers_pending,
        peer.optimize_topology,
        lambda: peer.reduce(array, array),
        lambda: peer.launch(array, array),
        lambda: peer.reduce_all([(array, array)]),
        lambda: peer.wait(AsyncOp(peer.comm, 0)),
        lambda: peer.sync(state),
    ):
        with fails("InvalidUsage", "not connected"):
            call()
    peer.connect()
    with fails("InvalidUsage", "connected already"):
        peer.connect()
    kept = last_error()
    peer.update_topology()
    assert last_error() == kept  # a success leaves it
    peer.destroy()
    build = BuildInfo(True)
    check(lib.pcclGetBuildInfo(byref(build)))
    assert not build.has_cuda_support
    say(event="ok")


def make_calls_with_wrong_arguments(number: int) -> None:
    """Makes calls with arguments that are refused, then right ones."""
    peer = connect()
    peer.gather(2)
    x, y = np.arange(100.0), np.zeros(100)

    def reduce(send: Any = x.ctypes.data, recv: Any = y.ctypes.data, **fields: Any) -> None:
        what = describe(x)
        for name, value in fields.items():
            setattr(what, name, value)
        check(lib.pcclAllReduce(send, recv, byref(what), peer.comm, None))

    wrong: list[tuple[dict[str, Any], str]]
    wrong = [
        ({"send": None}, "sendbuf is NULL"),
        ({"recv": None}, "recvbuf is NULL"),
        ({"op": 5}, "op 5"),
        ({"op": -1}, "op -1"),
        ({"datatype": 17}, "datatype 17"),
        ({"datatype": 12}, "bool elements have no sum"),
        ({"datatype": 15, "op": 3}, "complex64 elements have no max"),
        ({"distribution_hint": 3}, "distribution_hint 3"),
        ({"algorithm": 3}, "algorithm 3"),
        ({"algorithm": 1, "quantized_datatype": 99}, "quantized_datatype 99"),
        ({"count": 2**63}, "count is too large"),
        ({"recv": x.ctypes.data + 8}, "overlap"),
        ({"recv": x.ctypes.data - 8}, "overlap"),
    ]
    for arguments, word in wrong:
        with fails("InvalidArgument", "pcclAllReduce", word):
            reduce(**arguments)
    for most in (0, -1):
        with fails("InvalidArgument", "max_in_flight"):
            peer.reduce_all([(x, y)], most)

    def sync(entries: int = 1, **fields: Any) -> None:
        state = State(x=x)
        state.c.count = entries
        for name, value in fields.items():
            setattr(state.infos[0], name, value)
        peer.sync(state)

    wrong = [
        ({"name": None}, "name is NULL"),
        ({"name": b"a\xff"}, "not UTF-8"),
        ({"data": None}, "x: data is NULL"),
        ({"datatype": 17}, "x: no such datatype"),
        ({"count": 2**62}, "x: count is too large"),
        ({"device_type": 1}, "x: only CPU memory"),
        ({"device_type": 2}, "x: no such device_type"),
        ({"entries": 0}, "at least one entry"),
    ]
    for arguments, word in wrong:
        with fails("InvalidArgument", "pcclSynchronizeSharedState", word):
            sync(**arguments)
    with fails("InvalidArgument", "strategy 3"):
        peer.sync(State(x=x), 3)
    with fails("InvalidArgument", "attribute 5"):
        peer.attribute(5)
    assert (x == np.arange(100)).all() and not y.any()

    # None of this has put the members out of step.
    reduce(send=None, recv=None, count=0)
    assert peer.reduce_all([]).local_world_size == 2
    assert peer.reduce(x, y).local_world_size == 2 and (y == 2 * x).all()
    sync()
    say(event="ok")


def be_alone() -> None:
    """Makes calls as the only member."""
    peer = Peer()
    x, y = np.arange(100.0), np.zeros(100)
    for call in (
        lambda: peer.reduce(x, x),
        lambda: peer.launch(x, y),
        lambda: peer.reduce_all([(x, y)] * 3),
    ):
        with fails("TooFewPeers", "alone"):
            call()
    assert (x == np.arange(100)).all() and not y.any()
    with fails("InvalidUsage", "tag 0"):  # nothing was launched
        peer.wait(AsyncOp(peer.comm, 0))
    assert [peer.attribute(which) for which in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert not peer.peers_pending()
    peer.optimize_topology()
    peer.update_topology()
    info = peer.sync(State(x=x))
    assert (info.tx_bytes, info.rx_bytes) == (0, 0)
    peer.destroy()
    say(event="ok")


def reduce_every_type(number: int) -> None:
    """Reduces every type with every op, in place and not."""
    peer = connect()
    import ml_dtypes

    def reduce(send: Any, recv: Any, *what: Any) -> ReduceInfo:
        size = f"u{send.itemsize}"
        if send.dtype.name in np.sctypeDict:
            return peer.reduce(send, recv, *what)
        return peer.reduce(send.view(size), recv.view(size), *what, datatype=send.dtype.name)

    peer.gather(3)
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        base: Any = (np.arange(1001) % 3 + 1) * (1 - 1j if kind.kind == "c" else 1)
        inputs = [
            ((base + number) % 2 == 0 if name == "bool" else base + number) for number in range(3)
        ]
        inputs = [given.astype(kind) for given in inputs]
        wide = np.stack(inputs).astype(np.complex128 if kind.kind == "c" else np.float64)
        exact = [wide.sum(0), wide.sum(0) / 3, wide.prod(0), wide.max(0), wide.min(0)]
        known = {"b": ("max", "min"), "c": ("sum", "avg")}.get(kind.kind, OPS)
        for tag, op in enumerate(OPS):
            if op not in known:
                continue
            want = exact[tag].astype(kind)  # integers: towards zero
            mine, out = inputs[number].copy(), np.zeros(1001, kind)
            assert reduce(mine, out, op, tag).local_world_size == 3
            assert (out == want).all(), (name, op, out[:6], want[:6])
            assert (mine == inputs[number]).all()
            reduce(mine, mine, op, tag)
            assert (mine == want).all(), (name, op)
    say(event="ok")


def reduce_with_a_victim(number: int) -> None:
    """Reduces as it is told, "launch" or otherwise, and again after the loss."""
    peer = connect()
    peer.gather(3)
    say(event="gathered")
    x = np.arange(100_000.0)
    if hear() == "launch":
        launched = peer.launch(x, x, tag=5)
        say(event="launched")
        with fails("RankConnectionLost", "pcclAwaitAsyncReduce"):
            peer.wait(launched)
    else:
        with fails("RankConnectionLost", "pcclAllReduce"):
            peer.reduce(x, x, tag=5)
    assert (x == np.arange(100_000)).all()
    say(event="failed")
    assert peer.reduce(x, x, tag=5).local_world_size == 2  # the tag is free again
    assert peer.attribute() == 2 and (x == 2 * np.arange(100_000)).all()
    say(event="ok")


def reduce_many_with_a_victim(number: int) -> None:
    """Makes a multi call, in the middle of which the third member is killed."""
    peer = connect()
    peer.gather(3)
    pairs = [(np.full(1000, 1.0 + i), np.zeros(1000)) for i in range(20)]
    pairs[3] = (pairs[3][0], pairs[3][0])
    if number == 2:
        peer.reduce_all(pairs[:1])  # so the others are in the middle of theirs
        say(event="in the middle")
        hear()
    assert peer.reduce_all(pairs, most=3).local_world_size == 2
    for i, (send, recv) in enumerate(pairs):
        assert (recv == (3 if i == 0 else 2) * (1.0 + i)).all(), i
        assert i == 3 or (send == 1.0 + i).all(), i
    say(event="ok")


def launch_many(number: int) -> None:
    """Launches reductions, and awaits them on other threads."""
    peer = connect()
    peer.gather(2)
    x = np.arange(1000.0)
    outs = [np.zeros(1000) for _ in range(8)]
    hear()
    launched = [peer.launch(x, out, tag=tag) for tag, out in enumerate(outs)]
    if number == 0:  # the other has not called yet
        for call in (peer.update_topology, lambda: peer.sync(State(x=x))):
            with fails("PendingAsyncOps", "8 operations"):
                call()
    for reduce in (peer.launch, peer.reduce):
        with fails("InvalidArgument", "tag 3 is taken"):
            reduce(x, x, tag=3)
    say(event="launched")
    sizes = []
    threads = [
        threading.Thread(target=lambda op=op: sizes.append(peer.wait(op).local_world_size))
        for op in launched
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [2] * 8 and all((out == 2 * x).all() for out in outs)
    for tag in (3, 77):
        with fails("InvalidUsage", f"tag {tag}"):
            peer.wait(AsyncOp(peer.comm, tag))
    again = peer.launch(x, outs[0], tag=3)
    peer.reduce(x, outs[1], tag=4)
    assert peer.wait(again).local_world_size == 2
    peer.update_topology()
    say(event="ok")


def synchronise_a_state(number: int) -> None:
    """Synchronises states that differ, then ones that are the same."""
    peer = connect()
    peer.gather(2)
    ahead = number == 0
    weights, step = np.full(1000, 1.0 + ahead, np.float32), np.full(3, 7 * ahead, np.int64)
    state = State(5 if ahead else 0, weights=weights, step=step)
    info = peer.sync(state)
    assert state.c.revision == 5 and (weights == 2).all() and (step == 7).all()
    assert (info.tx_bytes, info.rx_bytes) == ((4024, 0) if ahead else (0, 4024))
    state.c.revision += 1
    info = peer.sync(state)
    assert state.c.revision == 6 and (info.tx_bytes, info.rx_bytes) == (0, 0)
    weights += ahead
    state.c.revision += 1
    peer.sync(state, 2 if ahead else 1)  # send only, receive only
    assert (weights == 3).all()
    with fails("InvalidUsage", "weights"):
        peer.sync(State(7, weights=np.zeros(10 + ahead, np.float32)))
    memory = np.zeros(9, np.float32)
    with fails("InvalidArgument", "v and w share memory"):
        peer.sync(State(7, v=memory[:5], w=memory[5 - ahead :]))
    with fails("InvalidUsage", "w: ", "the same memory as v"):
        peer.sync(State(7, v=memory, w=memory if ahead else memory.copy()))
    peer.sync(State(7, v=memory, w=memory))
    peer.sync(state)
    say(event="ok")


def meet_c_in_python() -> None:
    """Reduces and synchronises with a peer that uses C."""
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    x, weights = np.full(1000, 10.0, np.float32), np.ones(10, np.float32)
    assert comm.all_reduce(x, x, op=pccl.ReduceOp.SUM).world_size == 2 and (x == 11).all()
    what = pccl.ReduceDescriptor(
        count=10,
        op=pccl.ReduceOp.SUM,
        tag=100,
        operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT),
        quantization_options=pccl.QuantizationOptions(
            pccl.DataType.UINT8, pccl.QuantizationAlgorithm.NONE
        ),
    )
    comm.all_reduce_multiple_with_retry(
        [pccl.ReduceOpDescriptor.from_numpy(weights, weights, what)]
    )
    assert (weights == 2).all()
    weights[:] = 9
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")])
    comm.sync_shared_state(state)
    assert state.revision == 3 and (weights == 2).all()
    say(event="ok")


def meet_python(number: int) -> None:
    """Reduces and synchronises with a peer that uses Python."""
    peer = connect()
    peer.gather(2)
    x, weights = np.ones(1000, np.float32), np.ones(10, np.float32)
    assert peer.reduce(x, x).local_world_size == 2 and (x == 11).all()
    assert peer.reduce_all([(weights, weights)]).local_world_size == 2
    assert (weights == 2).all()
    peer.sync(State(3, weights=weights))
    assert (weights == 2).all()
    say(event="ok")


def count_members(group: int) -> None:
    """Looks at the attributes of a run of two groups."""
    peer = Peer(group=group)
    size = 2 if group == 0 else 1
    peer.gather(size)
    say(event="in")
    hear()
    assert not peer.peers_pending()  # its answer also tells of the other groups
    assert [peer.attribute(which) for which in (1, 2, 3, 4)] == [3, size, 2, 2]
    peer.optimize_topology()
    say(event="checked")
    hear()
    say(event="ok")


def disagree(number: int) -> None:
    """Reduces arrays of another size than the other member."""
    peer = connect()
    peer.gather(2)
    x = np.ones(100 + number, np.float32)
    with fails("InvalidArgument", "float32[100]", "float32[101]"):
        peer.reduce(x, x)
    assert (x == 1).all()
    x = np.ones(100, np.float32)
    assert peer.reduce(x, x, tag=1).local_world_size == 2
    say(event="ok")


def quantize(number: int) -> None:
    """Reduces with every way of quantization."""
    peer = connect()
    peer.gather(2)
    x = np.linspace(-1, 1, 1000)
    sums = []
    for tag, algorithm in enumerate((1, 2, 1)):
        out = np.zeros(1000)
        peer.reduce(x, out, tag=tag, algorithm=algorithm, quantized_datatype=tag % 2)
        assert 0 < np.abs(out - 2 * x).max() < 0.02
        sums.append(out.tobytes().hex())
    what: dict[str, Any]
    for what, text in (
        ({"quantized_datatype": 5}, "pcclUint8 or pcclInt8"),
        ({"op": "prod"}, "a product"),
    ):
        with fails("InvalidArgument", text):
            peer.reduce(x, x, **({"algorithm": 1} | what))
    with fails("InvalidArgument", "as uint8 (min_max)"):
        what = {"algorithm": 1, "quantized_datatype": 0} if number == 0 else {}
        peer.reduce(x, x, **what)
    say(event="sums", sums=sums)
    say(event="ok")


def fail_on_threads() -> None:
    """Fails differently on each of three threads."""
    lib.pcclInit()
    barrier = threading.Barrier(3)
    told = {}

    def fail(name: str) -> None:
        if name:
            getattr(lib, name)(None)
        barrier.wait()
        told[name] = last_error()

    threads = [
        threading.Thread(target=fail, args=(name,)) for name in ("pcclConnect", "pcclRunMaster", "")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {
        "pcclConnect": "pcclConnect failed with pcclInvalidArgument: comm is NULL",
        "pcclRunMaster": "pcclRunMaster failed with pcclInvalidArgument: master is NULL",
        "": "",
    }
    assert last_error() == ""
    say(event="ok")


def take_signals_in_a_call(number: int) -> None:
    """Waits in a call while signals come."""
    peer = connect()
    signal.signal(signal.SIGINT, lambda *_: None)
    peer.gather(2)
    x = np.ones(10)
    hear()
    launched = peer.launch(x, x)
    say(event="launched")
    assert peer.wait(launched).local_world_size == 2 and (x == 2).all()
    say(event="ok")


def destroy_with_a_reduction_in_flight(number: int) -> None:
    """The first member destroys its communicator while a reduction is in flight."""
    peer = connect()
    peer.gather(2)
    say(event="gathered")
    hear()
    x = np.ones(1000)
    if number == 0:
        peer.launch(x, x)
        peer.destroy()
        assert (x == 1).all()
        say(event="destroyed")
        hear()
    while number == 1 and peer.attribute() == 2:  # a newcomer's first is part of its joining
        peer.update_topology()
    assert (x == 1).all()
    say(event="ok")


def destroy_while_connecting() -> None:
    """Destroys a communicator that another thread connects."""
    hear()
    peer = Peer(connect=False)

    def connect() -> None:
        with fails("InvalidUsage", "closed"):
            peer.connect()
        say(event="ok")

    thread = threading.Thread(target=connect)
    thread.start()
    hear()
    peer.destroy()
    thread.join()


def watch_a_newcomer(number: int) -> None:
    """Says when a newcomer is pending, and ends when it has gone."""
    peer = connect()
    while not peer.peers_pending():
        pass
    say(event="pending")
    while peer.peers_pending():
        pass
    say(event="ok")


def fork_and_end(number: int) -> None:
    """The first member forks and ends without destroying anything."""
    peer = connect()
    peer.gather(2)
    if number == 0:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (peer.update_topology, peer.connect):
                    with fails("InvalidUsage", "forked"):
                        call()
                peer.destroy()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    x = np.ones(10)
    assert peer.reduce(x, x).local_world_size == 2 and (x == 2).all()
    if number == 1:
        hear()
        peer.update_topology()
        assert peer.attribute() == 1
    say(event="ok")


def lose_the_master(number: int) -> None:
    """Makes calls without a master, and connects to a new one."""
    peer = connect()
    peer.gather(2)
    x, out = np.ones(10), np.zeros(10)
    assert peer.reduce(x, out).local_world_size == 2
    say(event="in")
    hear()
    while True:  # as programs try again
        try:
            peer.reduce(x, out)
        except Failed as error:
            assert error.result in ("RankConnectionLost", "TooFewPeers"), error.sentence
            try:
                peer.attribute()
            except Failed as ended:
                assert ended.result == "InvalidUsage" and "connect again" in ended.sentence
                break
    with fails("UpdateTopologyFailed"):
        peer.update_topology()
    with fails("TopologyOptimizationFailed"):
        peer.optimize_topology()
    with fails("MasterConnectionFailed", "no master at"):
        peer.connect()
    say(event="out")
    hear()
    peer.connect()
    peer.gather(2)
    out[:] = 0
    assert peer.reduce(x, out).local_world_size == 2 and (out == 2).all()
    say(event="ok")


def time_out(number: int) -> None:
    """The first member times out; the second one calls too late."""
    peer = connect()
    peer.gather(2)
    x = np.ones(10)
    if number == 1:
        hear()
    with fails("RankConnectionLost", "deadline" if number == 0 else ""):
        peer.reduce(x, x)
    assert (x == 1).all()
    say(event="timed out")
    assert peer.reduce(x, x).local_world_size == 2
    say(event="ok")


def time_out_of_many(number: int) -> None:
    """The first member makes one call of eight reductions; the second one makes none."""
    peer = connect()
    peer.gather(2)
    if number == 0:
        arrays = np.ones((8, 10))
        began = time.monotonic()
        with fails("RankConnectionLost", "deadline"):
            peer.reduce_all([(x, x) for x in arrays], most=8)
        assert (arrays == 1).all()
        say(event="timed out", seconds=time.monotonic() - began)
    else:
        hear()
    say(event="ok")


def make_masters() -> None:
    """Makes, runs, interrupts and destroys masters."""

    def make(address: Address) -> c_void_p:
        master = c_void_p()
        check(lib.pcclCreateMaster(address, byref(master)))
        return master

    master = make(resolve("127.0.0.1:0"))
    where = Address()
    for call in (
        lib.pcclInterruptMaster,
        lib.pcclMasterAwaitTermination,
        lambda m: lib.pcclGetMasterAddress(m, byref(where)),
    ):
        with fails("InvalidUsage", "never run"):
            check(call(master))
    check(lib.pcclRunMaster(master))
    with fails("InvalidUsage", "once"):
        check(lib.pcclRunMaster(master))
    check(lib.pcclGetMasterAddress(master, byref(where)))
    assert where.port != 0 and list(where.inet.ipv4) == [127, 0, 0, 1]
    rival = make(where)
    with fails("InvalidUsage", "pcclRunMaster"):
        check(lib.pcclRunMaster(rival))
    check(lib.pcclDestroyMaster(rival))
    peer = Peer(f"127.0.0.1:{where.port}")
    assert peer.attribute() == 1
    peer.destroy()
    check(lib.pcclInterruptMaster(master))
    check(lib.pcclInterruptMaster(master))
    check(lib.pcclMasterAwaitTermination(master))
    check(lib.pcclMasterAwaitTermination(master))
    for _ in range(3):  # destroying stops it, too
        again = make(where)
        check(lib.pcclRunMaster(again))
        check(lib.pcclDestroyMaster(again))
    check(lib.pcclDestroyMaster(master))
    six = resolve("[::1]:5")
    assert (six.inet.protocol, six.port, bytes(six.inet.ipv6)[-1]) == (1, 5, 1)
    assert resolve("localhost").port == 48148
    for text in ("", ":5", "a:b", "1.2.3.4:99999", "no.such.host.invalid:1"):
        with fails("InvalidArgument", "pcclResolveAddress"):
            resolve(text)
    left = make(where)
    check(lib.pcclRunMaster(left))  # runs when the process ends
    say(event="ok")


def refuse_a_variable(variable: str, value: str, word: str) -> None:
    """Creates a communicator in an environment that is refused with a sentence that has `word`.

    The variable is set in the process that the library is in only: pccl reads some of them, too.
    """
    libc = ctypes.CDLL(None)
    libc.setenv(variable.encode(), value.encode(), 1)
    with fails("InvalidArgument", word):
        Peer(connect=False)
    say(event="ok")
