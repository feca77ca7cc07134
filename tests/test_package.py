"""The package: the effects of its import, its content, and the content of a release."""

import ast
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from unittest.mock import ANY

import pytest

import pccl
import pccl._core

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "pccl-collectives"


def run_python(code: str, folder: Path) -> str:
    """Runs `code` in a fresh interpreter outside the source tree and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_torch_nor_jax(tmp_path: Path) -> None:
    names = "torch jax jaxlib ml_dtypes cupy lightning transformers accelerate ray torchft".split()
    code = f"import sys, pccl; print(sorted(set({names}) & sys.modules.keys()))"
    assert run_python(code, tmp_path) == "[]\n"


def test_import_starts_no_thread_and_prints_nothing(tmp_path: Path) -> None:
    # Compared with NumPy alone, whose linear algebra may keep threads of its own.
    count = "import os; print(len(os.listdir('/proc/self/task')))"
    alone = run_python(f"import numpy; {count}", tmp_path)
    assert run_python(f"import numpy, pccl; {count}", tmp_path) == alone


def test_all_versions_are_the_distribution_version() -> None:
    version = importlib.metadata.version(DISTRIBUTION)
    assert pccl.__version__ == version
    assert pccl._core.__version__ == version


def test_package_is_marked_as_typed() -> None:
    assert (Path(pccl.__file__).parent / "py.typed").is_file()


def test_console_scripts_lead_to_functions() -> None:
    scripts = importlib.metadata.distribution(DISTRIBUTION).entry_points
    found = {script.name: script for script in scripts if script.group == "console_scripts"}
    assert set(found) == {"pccl", "pccl_master"}
    for script in found.values():
        assert callable(script.load())


def test_installing_pulls_in_numpy_the_binding_backend_and_rich_alone() -> None:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    plain = {re.split(r"[<>=!~\[ ;]", line)[0] for line in required if "extra ==" not in line}
    assert plain == {"numpy", "nanobind-backend", "rich"}


@pytest.mark.parametrize(
    "name",
    ["requirements-dev.txt", "requirements-integrations.txt", "tools/wheel/requirements.txt"],
)
def test_tools_are_pinned_and_come_from_no_named_place(name: str) -> None:
    for line in (ROOT / name).read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        assert not requirement or re.match(r"^[\w.-]+(\[\w+\])?==[\w.]+(;|$)", requirement), line
        assert "//" not in line and not line.startswith("-"), line


def wheel_tool(name: str) -> ModuleType:
    """The program tools/wheel/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "wheel" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stub_names(body: list[ast.stmt], prefix: str) -> set[str]:
    """Dotted names of the public functions, classes and members a stub declares."""
    names = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            names.add(prefix + node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not node.target.id.startswith("_"):
                names.add(prefix + node.target.id)
        if isinstance(node, ast.ClassDef):
            names |= stub_names(node.body, f"{prefix}{node.name}.")
    return names


def test_stub_names_exactly_what_the_native_module_has() -> None:
    stub = ast.parse((ROOT / "pccl" / "_core.pyi").read_text())
    native = set()
    for name, value in vars(pccl._core).items():
        if name.startswith("_"):
            continue
        native.add(name)
        if isinstance(value, type):
            native |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
    assert stub_names(stub.body, "") == native


def test_the_native_method_is_documented_alike_in_the_stub_and_in_its_source() -> None:
    source = (ROOT / "cpp" / "pccl" / "bindings" / "reducer.cpp").read_text()
    native = re.search(r'kAllReduce = R"\((.*?)\)";', source, re.DOTALL)
    stub = ast.parse((ROOT / "pccl" / "_core.pyi").read_text())
    documented = [
        ast.get_docstring(node)
        for node in ast.walk(stub)
        if isinstance(node, ast.FunctionDef) and node.name == "all_reduce"
    ]
    assert native and documented == [native[1]]


def test_source_distribution_has_what_a_build_needs_and_no_build_products(tmp_path: Path) -> None:
    code = f"import scikit_build_core.build as b; print(b.build_sdist({str(tmp_path)!r}))"
    pytest.importorskip("scikit_build_core")
    name = run_python(code, ROOT).splitlines()[-1]
    with tarfile.open(tmp_path / name) as archive:
        files = {member.partition("/")[2] for member in archive.getnames()}
    needed = ["CMakeLists.txt", "pyproject.toml", "LICENSE", "README.md", "PKG-INFO", "Makefile"]
    needed += ["pccl/__init__.py", "pccl/_core.pyi", "pccl/py.typed", "cpp/pccl/base/error.h"]
    needed += ["cpp/include/pccl.h", "cpp/pccl/capi/pccl.pc.in", "cpp/pccl/capi/exports.map"]
    needed += [
        "adapters/__init__.py",
        "_pccl_torch/__init__.py",
        "tests/conftest.py",
        "requirements-dev.txt",
    ]
    assert set(needed) <= files
    unwanted = re.compile(r"^(build|dist|\.venv|\.ci|\.git)(/|$)|\.so$|__pycache__")
    assert not [file for file in files if unwanted.search(file)]


def test_release_wheels_are_built_without_the_testing_module() -> None:
    # The check of a real wheel takes a build: tools/check_package.sh.
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[tool.scikit-build.cmake.define]")[2].partition("\n[")[0]
    assert 'PCCL_TESTING = "OFF"' in table


def test_a_build_from_source_uses_the_openssl_of_the_system() -> None:
    version, bundled = pccl._core.openssl()
    assert re.match(r"OpenSSL [1-9]\d*\.\d", version)
    assert not bundled


@pytest.mark.skipif(
    not all(map(shutil.which, ("c++", "cmake"))), reason="needs a compiler and cmake"
)
def test_a_build_for_a_big_endian_processor_is_refused_with_a_sentence(tmp_path: Path) -> None:
    toolchain = tmp_path / "toolchain.cmake"
    toolchain.write_text(
        "set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_CXX_COMPILER_FORCED TRUE)\n"
        "set(CMAKE_CXX_ABI_COMPILED TRUE)\nset(CMAKE_CXX_BYTE_ORDER BIG_ENDIAN)\n"
    )
    configure = ["cmake", "-S", ROOT, "-B", tmp_path, f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"]
    big = ["-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    header = ["-x", "c++", ROOT / "cpp/pccl/base/dtype.h"]
    compile_it = ["c++", "-std=c++20", "-fsyntax-only", *big, *header]
    for command in (configure, compile_it):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert "pccl needs a little-endian processor" in done.stderr


def test_the_changelog_has_a_section_for_the_version() -> None:
    version = importlib.metadata.version(DISTRIBUTION)
    changelog = (ROOT / "docs" / "changelog.md").read_text()
    assert re.search(rf"^## {re.escape(version)} \(.+\)$", changelog, re.MULTILINE)


def test_old_and_new_names_of_a_symbol_give_the_newest_that_old_systems_have(
    tmp_path: Path,
) -> None:
    # A library with the versions that glibc gives a symbol that it has changed twice.
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no compiler")
    source, versions, library = (tmp_path / name for name in ("a.c", "a.map", "a.so"))
    names = ["changed, changed@GLIBC_2.2.5", "changed, changed@GLIBC_2.3.2"]
    names += ["changed, changed@@GLIBC_2.34", "withdrawn, withdrawn@GLIBC_2.2.5"]
    lines = [f'__asm__(".symver {name}");' for name in names]
    lines = [line.replace("changed,", f"changed_{i},", 1) for i, line in enumerate(lines)]
    lines += [f"void changed_{i}(void) {{}}" for i in range(3)]
    lines += ["void withdrawn(void) {}", "void too_new(void) {}", "void plain(void) {}"]
    source.write_text("\n".join([*lines, ""]))
    versions.write_text(
        "GLIBC_2.2.5 { global: plain; local: changed_*; }; GLIBC_2.3.2 { };"
        " GLIBC_2.34 { global: too_new; };"
    )
    script = f"-Wl,--version-script={versions}"
    subprocess.run([compiler, "-shared", "-fPIC", script, source, "-o", library], check=True)
    assert wheel_tool("stubs").symbols_of(library) == {
        "changed": ("GLIBC_2.3.2", "FUNC", ANY),
        "plain": ("GLIBC_2.2.5", "FUNC", ANY),
    }


def test_systemd_accepts_the_unit_of_the_master(tmp_path: Path) -> None:
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd-analyze")
    unit = (ROOT / "deploy" / "pccl-master.service").read_text()
    # The program must exist.
    unit, count = re.subn(
        r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.MULTILINE
    )
    assert count == 1
    path = tmp_path / "pccl-master.service"
    path.write_text(unit)
    done = subprocess.run([systemd, "verify", path], capture_output=True, text=True, timeout=60)
    about_it = [line for line in done.stderr.splitlines() if "pccl-master" in line]
    assert done.returncode == 0 and not about_it, done.stderr
