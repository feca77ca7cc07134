"""pccl.h and libpccl.so: what is declared, what is installed, the examples, and every call, with real processes.

PCCL_C_BUILD names a build tree that has the library; without it the editable build's is taken, or one is made in
build/c, which takes minutes.
"""

import os
import re
import shutil
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from workers import Run, Worker, running

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "cpp" / "include" / "pccl.h"
LAYOUT = Path(__file__).with_name("capi_layout.c")
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]


def find_tree() -> Path | None:
    """A build tree that has libpccl.so."""
    given = os.environ.get("PCCL_C_BUILD")
    trees = [Path(given)] if given else sorted((ROOT / "build").glob("editable-*"))
    return next((tree for tree in trees if (tree / "libpccl.so").exists()), None)


pytestmark = [
    pytest.mark.skipif(
        not all(map(shutil.which, ("cc", "c++", "cmake"))), reason="needs a compiler and cmake"
    ),
    pytest.mark.timeout(120 if find_tree() else 1800),
]


def sh(*command: object, **env: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C library is installed, as a user installs it."""
    tree = find_tree()
    if tree is None:
        tree = ROOT / "build" / "c"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        sh("cmake", "-S", ROOT, "-B", tree, *generator, "-DPCCL_PYTHON=OFF", "-DPCCL_WERROR=ON")
        sh("cmake", "--build", tree, "--target", "pccl")
    prefix = tmp_path_factory.mktemp("installed")
    sh("cmake", "--install", tree, "--prefix", prefix, "--component", "c")
    return prefix


@pytest.fixture(scope="session")
def library(installed: Path) -> Path:
    (found,) = installed.glob("lib*/**/libpccl.so")
    return found


@pytest.fixture(scope="session")
def examples(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, built through find_package."""
    tree = tmp_path_factory.mktemp("examples")
    source = ROOT / "examples" / "c"
    flags = " ".join(["-Wall", "-Wextra", "-Werror"])
    sh(
        *("cmake", "-S", source, "-B", tree, f"-DCMAKE_PREFIX_PATH={installed}"),
        *(f"-DCMAKE_C_FLAGS={flags}", f"-DCMAKE_CXX_FLAGS={flags}"),
    )
    sh("cmake", "--build", tree)
    return tree


# ---- the header, and what is installed


@pytest.mark.parametrize(
    ("compiler", "language"),
    [("cc", "c99"), ("cc", "c11"), ("c++", "c++17"), ("c++", "c++20")],
)
def test_values_layouts_and_signatures_are_those_of_pypccl(compiler: str, language: str) -> None:
    kind = "c++" if compiler == "c++" else "c"
    sh(
        *(compiler, f"-std={language}", *STRICT, "-fsyntax-only", "-I", HEADER.parent),
        *("-x", kind, LAYOUT),
    )


def declared() -> set[str]:
    return set(
        re.findall(r"\b(pccl[A-Z]\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S))
    )


def test_the_library_exports_the_header_and_nothing_else(library: Path) -> None:
    if not shutil.which("nm"):
        pytest.skip("needs nm")
    lines = sh("nm", "-D", "--defined-only", library).splitlines()
    assert {line.split()[-1] for line in lines} == declared()
    assert len(declared()) == 22


def test_the_library_has_a_soname_and_knows_nothing_of_python(library: Path) -> None:
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    dynamic = sh("readelf", "-d", library)
    assert re.search(r"SONAME.*\[libpccl\.so\.0\]", dynamic)
    assert "python" not in dynamic.lower()
    assert (library.parent / "libpccl.so.0").exists()
    assert "Py" not in sh("nm", "-D", "--undefined-only", library)


def test_every_function_is_documented_where_it_is_declared() -> None:
    text = HEADER.read_text()
    for name in declared():
        assert re.search(rf"\*/\nPCCL_EXPORT (pcclResult_t |const char\* ?){name}\([^)]", text), (
            name
        )


def test_no_wheel_carries_the_c_library() -> None:
    # The check of a real wheel takes a build: tools/check_package.sh.
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.scikit-build.cmake.define]")[2].partition("\n[")[0]
    assert 'PCCL_C = "OFF"' in table
    assert 'install.components = ["python"]' in text


def test_pkg_config_finds_it(installed: Path, library: Path, tmp_path: Path) -> None:
    if not shutil.which("pkg-config"):
        pytest.skip("needs pkg-config")
    where = {"PKG_CONFIG_PATH": str(library.parent / "pkgconfig")}
    flags = sh("pkg-config", "--cflags", "--libs", "pccl", **where).split()
    version = sh("pkg-config", "--modversion", "pccl", **where).strip()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    source = ROOT / "examples" / "c"
    sh("cc", "-std=c99", *STRICT, source / "average.c", *flags, "-o", tmp_path / "average")
    sh("c++", "-std=c++17", *STRICT, source / "line.cpp", *flags, "-o", tmp_path / "line")
    done = subprocess.run(
        [tmp_path / "line"],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": str(library.parent)},
    )
    assert done.returncode == 2 and "usage" in done.stderr


def test_find_package_wants_a_fitting_version(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(p LANGUAGES NONE)\n"
        "find_package(pccl 99.0 QUIET)\nif(pccl_FOUND)\nmessage(FATAL_ERROR)\nendif()\n"
        "find_package(pccl 0.1 REQUIRED)\nget_target_property(where pccl::pccl LOCATION)\n"
        'message(STATUS "at ${where}")\n'
    )
    told = sh("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={installed}")
    assert f"at {installed}" in told


# ---- the examples, as processes, with the C master


@contextmanager
def c_master(examples: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    process = subprocess.Popen(
        [examples / "master", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().split()[-1]}", process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run_peers(program: Path, address: str, count: int) -> str:
    """Everything that `count` peers of an example print."""
    peers = [
        subprocess.Popen(
            [program, address, str(count), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(count)
    ]
    try:
        told = [peer.communicate(timeout=200)[0] for peer in peers]
        assert [peer.returncode for peer in peers] == [0] * count, told
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    return "".join(told)


def test_the_c_example_averages_exactly_and_goes_on_without_who_vanished(examples: Path) -> None:
    with c_master(examples) as (address, master):
        told = run_peers(examples / "average", address, 3)
        for peer in (0, 1):
            for step in range(6):
                mean, peers = ("2.000", 3) if step < 3 else ("1.500", 2)
                assert f"peer {peer}, step {step}: mean {mean} over {peers} peers" in told
        assert "peer 2 vanishes" in told and "peer 2, step 3" not in told
        # Everybody took the weights of whoever came first: 0, 1 or 2, less 3 * 0.5 * (2 + 1.5).
        ends = set(re.findall(r"ends with weights (\S+)", told))
        assert len(ends) == 1 and float(ends.pop()) + 5.25 in (0, 1, 2)
        assert len(re.findall("received 4000 bytes", told)) == 2
        master.send_signal(signal.SIGTERM)
        assert master.wait(30) == 0


def test_the_cpp_example_learns_the_same_bits_on_all_peers(examples: Path) -> None:
    with c_master(examples) as (address, master):
        told = run_peers(examples / "line", address, 2)
        assert len(re.findall(r"y = 3\.000 x \+ -1\.000", told)) == 2
        assert len(set(re.findall(r"bits (.*)", told))) == 1
        master.send_signal(signal.SIGINT)
        assert master.wait(30) == 0


# ---- every call

# What every C peer of these tests starts with. NUMBER: 0, 1, ...; which one joins first is left open.
CONNECT = """
from capi import *
peer = Peer()
say(event="connected")
"""


@pytest.fixture
def run(library: Path) -> Iterator[Run]:
    here = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, here))  # workers import capi.py
    with running(PCCL_C_LIBRARY=str(library), PYTHONPATH=path) as made:
        yield made


def c_peers(run: Run, count: int, code: str, **env: str) -> list[Worker]:
    """Peers that connect and then run `code`."""
    code = CONNECT + textwrap.dedent(code)
    peers = [run.peer(f"NUMBER = {number}\n{code}", **env) for number in range(count)]
    for peer in peers:
        peer.expect("connected")
    return peers


def ok(*peers: Worker) -> None:
    """Waits for these to have come to their end."""
    for peer in peers:
        peer.expect("ok")
    for peer in peers:
        assert peer.ends() == 0, peer.stderr()


def test_null_unconnected_and_uninitialised_calls_are_refused_with_a_sentence(run: Run) -> None:
    peer = run.peer(
        """
        from capi import *
        assert last_error() == ""
        comm, out = c_void_p(), c_void_p(0x5555)
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
            assert last_error().startswith(f"pccl{name} failed with pcclInvalidArgument: "), last_error()
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
        with fails("InvalidArgument", "255"):
            check(lib.pcclCreateCommunicator(byref(CreateParams(resolve("[::1]:1"), 0, 257)), byref(comm)))

        peer = Peer(connect=False)
        array, state = np.ones(10), State(x=np.ones(10))
        for call in (
            peer.update_topology, peer.attribute, peer.peers_pending, peer.optimize_topology,
            lambda: peer.reduce(array, array), lambda: peer.launch(array, array),
            lambda: peer.reduce_all([(array, array)]), lambda: peer.wait(AsyncOp(peer.comm, 0)),
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
        """
    )
    ok(peer)


def test_arguments_of_reductions_and_states_are_checked_before_anything_starts(run: Run) -> None:
    code = """
    peer.gather(2)
    x, y = np.arange(100.0), np.zeros(100)

    def reduce(send=x.ctypes.data, recv=y.ctypes.data, **fields):
        what = describe(x)
        for name, value in fields.items():
            setattr(what, name, value)
        check(lib.pcclAllReduce(send, recv, byref(what), peer.comm, None))

    for wrong, word in [
        (dict(send=None), "sendbuf is NULL"), (dict(recv=None), "recvbuf is NULL"),
        (dict(op=5), "op 5"), (dict(op=-1), "op -1"), (dict(datatype=12), "datatype 12"),
        (dict(distribution_hint=3), "distribution_hint 3"), (dict(algorithm=3), "algorithm 3"),
        (dict(algorithm=1, quantized_datatype=99), "quantized_datatype 99"),
        (dict(count=2**63), "count is too large"),
        (dict(recv=x.ctypes.data + 8), "overlap"), (dict(recv=x.ctypes.data - 8), "overlap"),
    ]:
        with fails("InvalidArgument", "pcclAllReduce", word):
            reduce(**wrong)
    for most in (0, -1):
        with fails("InvalidArgument", "max_in_flight"):
            peer.reduce_all([(x, y)], most)

    def sync(entries=1, **fields):
        state = State(x=x)
        state.c.count = entries
        for name, value in fields.items():
            setattr(state.infos[0], name, value)
        peer.sync(state)

    for wrong, word in [
        (dict(name=None), "name is NULL"), (dict(data=None), "x: data is NULL"),
        (dict(datatype=12), "x: no such datatype"), (dict(count=2**62), "x: count is too large"),
        (dict(device_type=1), "x: only CPU memory"), (dict(device_type=2), "x: no such device_type"),
        (dict(entries=0), "at least one entry"),
    ]:
        with fails("InvalidArgument", "pcclSynchronizeSharedState", word):
            sync(**wrong)
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
    """
    ok(*c_peers(run, 2, code))


def test_alone_gets_too_few_peers_and_keeps_its_arrays(run: Run) -> None:
    peer = run.peer(
        """
        from capi import *
        peer = Peer()
        x, y = np.arange(100.0), np.zeros(100)
        for call in (
            lambda: peer.reduce(x, x), lambda: peer.launch(x, y), lambda: peer.reduce_all([(x, y)] * 3),
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
        """
    )
    ok(peer)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_every_type_and_op_is_reduced_exactly_in_place_and_not(run: Run, shm: str) -> None:
    pytest.importorskip("ml_dtypes")
    code = """
    import ml_dtypes

    def reduce(send, recv, *what):
        if send.dtype.name != "bfloat16":
            return peer.reduce(send, recv, *what)
        return peer.reduce(send.view(np.uint16), recv.view(np.uint16), *what, datatype="bfloat16")

    peer.gather(3)
    for name in DTYPES:
        kind = np.dtype(getattr(ml_dtypes, name, name))
        inputs = [(np.arange(1001) % 3 + 1 + number).astype(kind) for number in range(3)]
        wide = np.stack(inputs).astype(np.float64)
        exact = [wide.sum(0), wide.sum(0) / 3, wide.prod(0), wide.max(0), wide.min(0)]
        for tag, op in enumerate(OPS):
            want = exact[tag].astype(kind)  # integers: towards zero
            mine, out = inputs[NUMBER].copy(), np.zeros(1001, kind)
            assert reduce(mine, out, op, tag).local_world_size == 3
            assert (out == want).all(), (name, op, out[:6], want[:6])
            assert (mine == inputs[NUMBER]).all()
            reduce(mine, mine, op, tag)
            assert (mine == want).all(), (name, op)
    say(event="ok")
    """
    ok(*c_peers(run, 3, code, PCCL_SHM=shm))


@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_peer_killed_in_an_all_reduce_leaves_inputs_and_the_survivors_go_on(
    run: Run, shm: str
) -> None:
    code = """
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
    """
    peers = first, second, victim = c_peers(run, 3, code, PCCL_SHM=shm)
    for peer in peers:
        peer.expect("gathered")
    for peer in (first, victim):
        peer.tell("launch")
        peer.expect("launched")
    victim.signal(signal.SIGKILL)
    first.expect("failed")
    second.tell("reduce")
    second.expect("failed")
    ok(first, second)


@pytest.mark.parametrize("shm", ["1", "0"])
def test_multiple_reductions_are_completed_by_the_survivors(run: Run, shm: str) -> None:
    code = """
    peer.gather(3)
    pairs = [(np.full(1000, 1.0 + i), np.zeros(1000)) for i in range(20)]
    pairs[3] = (pairs[3][0], pairs[3][0])
    if NUMBER == 2:
        peer.reduce_all(pairs[:1])  # so the others are in the middle of theirs
        say(event="in the middle")
        hear()
    assert peer.reduce_all(pairs, most=3).local_world_size == 2
    for i, (send, recv) in enumerate(pairs):
        assert (recv == (3 if i == 0 else 2) * (1.0 + i)).all(), i
        assert i == 3 or (send == 1.0 + i).all(), i
    say(event="ok")
    """
    *survivors, victim = c_peers(run, 3, code, PCCL_SHM=shm)
    victim.expect("in the middle")
    victim.signal(signal.SIGKILL)
    ok(*survivors)


def test_asynchronous_reductions_are_awaited_once_by_any_thread_and_hold_their_tag(
    run: Run,
) -> None:
    code = """
    peer.gather(2)
    x = np.arange(1000.0)
    outs = [np.zeros(1000) for _ in range(8)]
    hear()
    launched = [peer.launch(x, out, tag=tag) for tag, out in enumerate(outs)]
    if NUMBER == 0:  # the other has not called yet
        for call in (peer.update_topology, lambda: peer.sync(State(x=x))):
            with fails("PendingAsyncOps", "8 operations"):
                call()
    for call in (peer.launch, peer.reduce):
        with fails("InvalidArgument", "tag 3 is taken"):
            call(x, x, tag=3)
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
    """
    first, second = c_peers(run, 2, code)
    for peer in (first, second):
        peer.tell("go")
        peer.expect("launched")
    ok(first, second)


def test_a_shared_state_reaches_newcomers_and_moves_nothing_in_step(run: Run) -> None:
    code = """
    peer.gather(2)
    ahead = NUMBER == 0
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
        peer.sync(State(7, v=memory[:5], w=memory[5 - ahead:]))
    with fails("InvalidUsage", "w: ", "the same memory as v"):
        peer.sync(State(7, v=memory, w=memory if ahead else memory.copy()))
    peer.sync(State(7, v=memory, w=memory))
    peer.sync(state)
    say(event="ok")
    """
    ok(*c_peers(run, 2, code))


def test_c_peers_and_python_peers_are_members_of_one_run(run: Run) -> None:
    python = """
    comm = pccl.Communicator(os.environ["PCCL_MASTER"])
    comm.connect()
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < 2:
        comm.update_topology()
    x, weights = np.full(1000, 10.0, np.float32), np.ones(10, np.float32)
    assert comm.all_reduce(x, x, op=pccl.ReduceOp.SUM).world_size == 2 and (x == 11).all()
    what = pccl.ReduceDescriptor(
        count=10, op=pccl.ReduceOp.SUM, tag=100,
        operand_descriptor=pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT),
        quantization_options=pccl.QuantizationOptions(
            pccl.DataType.UINT8, pccl.QuantizationAlgorithm.NONE))
    comm.all_reduce_multiple_with_retry(
        [pccl.ReduceOpDescriptor.from_numpy(weights, weights, what)])
    assert (weights == 2).all()
    weights[:] = 9
    state = pccl.SharedState([pccl.TensorInfo.from_numpy(weights, "weights")])
    comm.sync_shared_state(state)
    assert state.revision == 3 and (weights == 2).all()
    say(event="ok")
    """
    other = run.peer(python)
    (peer,) = c_peers(
        run,
        1,
        """
        peer.gather(2)
        x, weights = np.ones(1000, np.float32), np.ones(10, np.float32)
        assert peer.reduce(x, x).local_world_size == 2 and (x == 11).all()
        assert peer.reduce_all([(weights, weights)]).local_world_size == 2
        assert (weights == 2).all()
        peer.sync(State(3, weights=weights))
        assert (weights == 2).all()
        say(event="ok")
        """,
    )
    ok(peer, other)


def test_attributes_count_groups_and_members(run: Run) -> None:
    code = """
    from capi import *
    peer = Peer(group=GROUP)
    size = 2 if GROUP == 0 else 1
    peer.gather(size)
    say(event="in")
    hear()
    assert not peer.peers_pending()  # its answer also tells of the other groups
    assert [peer.attribute(which) for which in (1, 2, 3, 4)] == [3, size, 2, 2]
    peer.optimize_topology()
    say(event="checked")
    hear()
    say(event="ok")
    """
    peers = [run.peer(f"GROUP = {group}\n" + textwrap.dedent(code)) for group in (0, 0, 1)]
    for peer in peers:
        peer.expect("in")
    for peer in peers:
        peer.tell("check")
    for peer in peers:
        peer.expect("checked")
    for peer in peers:
        peer.tell("end")
    ok(*peers)


def test_members_that_disagree_all_get_the_sentence_that_names_it(run: Run) -> None:
    code = """
    peer.gather(2)
    x = np.ones(100 + NUMBER, np.float32)
    with fails("InvalidArgument", "float32[100]", "float32[101]"):
        peer.reduce(x, x)
    assert (x == 1).all()
    x = np.ones(100, np.float32)
    assert peer.reduce(x, x, tag=1).local_world_size == 2
    say(event="ok")
    """
    ok(*c_peers(run, 2, code))


def test_quantized_reductions_are_near_and_the_same_for_all(run: Run) -> None:
    code = """
    peer.gather(2)
    x = np.linspace(-1, 1, 1000)
    sums = []
    for tag, algorithm in enumerate((1, 2, 1)):
        out = np.zeros(1000)
        peer.reduce(x, out, tag=tag, algorithm=algorithm, quantized_datatype=tag % 2)
        assert 0 < np.abs(out - 2 * x).max() < 0.02
        sums.append(out.tobytes().hex())
    for what, text in (
        ({"quantized_datatype": 5}, "pcclUint8 or pcclInt8"), ({"op": "prod"}, "a product"),
    ):
        with fails("InvalidArgument", text):
            peer.reduce(x, x, **{"algorithm": 1, **what})
    with fails("InvalidArgument", "as uint8 (min_max)"):
        peer.reduce(x, x, **({"algorithm": 1, "quantized_datatype": 0} if NUMBER == 0 else {}))
    say(event="sums", sums=sums)
    say(event="ok")
    """
    peers = c_peers(run, 2, code, PCCL_SHM="0")
    first, second = (peer.expect("sums")["sums"] for peer in peers)
    assert first == second
    ok(*peers)


def test_the_last_error_belongs_to_its_thread(run: Run) -> None:
    peer = run.peer(
        """
        from capi import *
        lib.pcclInit()
        barrier = threading.Barrier(3)
        told = {}

        def fail(name):
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
        """
    )
    ok(peer)


def test_a_signal_does_not_end_a_call(run: Run) -> None:
    code = """
    signal.signal(signal.SIGINT, lambda *_: None)
    peer.gather(2)
    x = np.ones(10)
    hear()
    launched = peer.launch(x, x)
    say(event="launched")
    assert peer.wait(launched).local_world_size == 2 and (x == 2).all()
    say(event="ok")
    """
    first, second = c_peers(run, 2, code)
    first.tell("go")
    first.expect("launched")
    for _ in range(100):
        first.signal(signal.SIGINT)
    second.tell("go")
    second.expect("launched")
    ok(first, second)


def test_destroying_ends_reductions_in_flight_and_leaves_their_memory_alone(run: Run) -> None:
    code = """
    peer.gather(2)
    say(event="gathered")
    hear()
    x = np.ones(1000)
    if NUMBER == 0:
        peer.launch(x, x)
        peer.destroy()
        assert (x == 1).all()
        say(event="destroyed")
        hear()
    while NUMBER == 1 and peer.attribute() == 2:  # a newcomer's first is part of its joining
        peer.update_topology()
    assert (x == 1).all()
    say(event="ok")
    """
    leaving, other = c_peers(run, 2, code)
    for peer in (leaving, other):
        peer.expect("gathered")
    leaving.tell("go")
    leaving.expect("destroyed")
    other.tell("go")
    ok(other)
    leaving.tell("go")
    ok(leaving)


def test_destroying_ends_a_connect_of_another_thread(run: Run) -> None:
    newcomer = run.peer(
        """
        from capi import *
        hear()
        peer = Peer(connect=False)

        def connect():
            with fails("InvalidUsage", "closed"):
                peer.connect()
            say(event="ok")

        thread = threading.Thread(target=connect)
        thread.start()
        hear()
        peer.destroy()
        thread.join()
        """
    )
    (member,) = c_peers(
        run,
        1,
        """
        while not peer.peers_pending():
            pass
        say(event="pending")
        while peer.peers_pending():
            pass
        say(event="ok")
        """,
    )
    newcomer.tell("connect")
    member.expect("pending")
    newcomer.tell("destroy")
    ok(newcomer, member)


def test_a_process_that_just_ends_leaves_and_a_forked_child_harms_nobody(run: Run) -> None:
    code = """
    peer.gather(2)
    if NUMBER == 0:
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
    if NUMBER == 1:
        hear()
        peer.update_topology()
        assert peer.attribute() == 1
    say(event="ok")
    """
    ending, other = c_peers(run, 2, code)
    ok(ending)
    other.tell("go")
    ok(other)


def test_without_its_master_every_call_fails_and_a_new_one_takes_it_in(run: Run) -> None:
    code = """
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
    """
    peers = c_peers(run, 2, code, PCCL_RECONNECT_TIMEOUT="1")
    for peer in peers:
        peer.expect("in")
    run.master.signal(signal.SIGKILL)
    run.master.ends()
    for peer in peers:
        peer.tell("go")
    for peer in peers:
        peer.expect("out")
    run.restart_master()
    for peer in peers:
        peer.tell("go")
    ok(*peers)


def test_pccl_timeout_bounds_a_call(run: Run) -> None:
    code = """
    peer.gather(2)
    x = np.ones(10)
    if NUMBER == 1:
        hear()
    with fails("RankConnectionLost", "deadline" if NUMBER == 0 else ""):
        peer.reduce(x, x)
    assert (x == 1).all()
    say(event="timed out")
    assert peer.reduce(x, x).local_world_size == 2
    say(event="ok")
    """
    first, second = c_peers(run, 2, code, PCCL_TIMEOUT="5")
    first.expect("timed out")
    second.tell("go")
    second.expect("timed out")
    ok(first, second)


def test_masters_are_made_run_stopped_and_their_port_is_free_again(run: Run) -> None:
    peer = run.peer(
        """
        from capi import *
        def make(address):
            master = c_void_p()
            check(lib.pcclCreateMaster(address, byref(master)))
            return master
        master = make(resolve("127.0.0.1:0"))
        where = Address()
        for call in (lib.pcclInterruptMaster, lib.pcclMasterAwaitTermination,
                     lambda m: lib.pcclGetMasterAddress(m, byref(where))):
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
        """
    )
    ok(peer)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PCCL_PORT", "70000"),
        ("PCCL_ADVERTISE", "a:b"),
        ("PCCL_STRIPES", "x"),
        ("PCCL_SECRET", "s"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(run: Run, variable: str, value: str) -> None:
    # In the process that the library is in only: our own Python, too, reads some of them.
    peer = run.peer(
        f"""
        from capi import *
        libc = ctypes.CDLL(None)
        libc.setenv(b"{variable}", b"{value}", 1)
        with fails("InvalidArgument", "{variable if variable != "PCCL_ADVERTISE" else "a:b"}"):
            Peer(connect=False)
        say(event="ok")
        """
    )
    ok(peer)
