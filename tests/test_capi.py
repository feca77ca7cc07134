"""pccl.h and libpccl.so: what is declared, what is installed, and the examples."""

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import clibrary
import pytest
from clibrary import ROOT, sh

HEADER = ROOT / "cpp" / "include" / "pccl.h"
LAYOUT = Path(__file__).parent / "programs" / "c" / "capi_layout.c"
pytestmark = clibrary.MARKS
STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror"]


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


# ---- programs in C


def compiled(name: str, installed: Path, library: Path, folder: Path) -> Path:
    """A program of tests/programs/c."""
    source = Path(__file__).parent / "programs" / "c" / f"{name}.c"
    flags = ["-std=c11", "-D_GNU_SOURCE", f"-I{installed / 'include'}"]
    link = [f"-L{library.parent}", "-lpccl", "-lpthread", f"-Wl,-rpath,{library.parent}"]
    sh("cc", *flags, source, "-o", folder / name, *link)
    return folder / name


def test_openssl_is_there_until_the_process_has_ended(
    installed: Path, library: Path, tmp_path: Path
) -> None:
    program = compiled("late_secret", installed, library, tmp_path)
    for _ in range(5):
        sh(program, PCCL_BIND="127.0.0.1")


def test_a_child_makes_its_own_communicator_whatever_other_threads_do_at_the_fork(
    installed: Path, library: Path, tmp_path: Path
) -> None:
    sh(compiled("fork_beside_creation", installed, library, tmp_path), 100)


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
