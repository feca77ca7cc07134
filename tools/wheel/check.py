"""check.py DIST [--release]: checks what `make package` left in DIST; --release also the changelog.

One line per check; the first failure ends it with exit status 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LARGEST = 6_000_000
# (2, 28): the nanobind-backend wheels need as much.
NEWEST_GLIBC = (2, 28)


def fail(sentence: str) -> None:
    sys.exit(f"package: {sentence}")


def run(*command: str | Path, folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def project_version() -> str:
    found = re.search(r'^version = "([^"]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def changelog_heading(changelog: str, version: str) -> str | None:
    """The text in parentheses after the version's heading; None without a section."""
    found = re.search(rf"^## {re.escape(version)}(?: \((.*)\))?$", changelog, re.MULTILINE)
    return None if found is None else found[1] or ""


def check_changelog(version: str) -> None:
    heading = changelog_heading((ROOT / "docs" / "changelog.md").read_text(), version)
    if heading is None:
        fail(f"docs/changelog.md has no section {version}")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", heading):
        print(f"changelog: {version} is {heading or 'without a date'}; date it before the upload")
    else:
        print(f"changelog: {version} of {heading}")


def exported(module: Path) -> list[str]:
    cells = map(str.split, run("readelf", "--dyn-syms", "-W", module).splitlines())
    return [row[7] for row in cells if len(row) > 7 and row[6] != "UND"]


def check_module(module: Path) -> None:
    """Checks the libraries that the extension needs and the symbols that it exports."""
    dynamic = run("readelf", "-d", "-V", "-W", module)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    if unexpected := {name for name in needed if re.match("lib(ssl|crypto|asio|xxhash)", name)}:
        fail(f"the extension needs {sorted(unexpected)}")
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"Name: GLIBC_([\d.]+)", dynamic)}
    if max(versions) > NEWEST_GLIBC:
        fail(f"the extension needs glibc {max(versions)}")
    # Hidden, so that an OpenSSL that Python's ssl loads does not use them.
    foreign = re.compile(r"(SSL|EVP|CRYPTO|OPENSSL|BIO|ERR|RAND|OSSL|ossl)_|pthread|__libc")
    if shown := [name for name in exported(module) if foreign.match(name)]:
        fail(f"the extension exports {shown[:5]}")
    print(f"needs: {' '.join(sorted(needed))}; glibc {'.'.join(map(str, max(versions)))}")


def check_wheel(wheel: Path, version: str) -> None:
    if not re.fullmatch(
        rf"pccl_collectives-{re.escape(version)}-cp310-abi3-(manylinux\w+\.)*manylinux\w+\.whl",
        wheel.name,
    ):
        fail(f"{wheel.name} is not a stable-ABI wheel of {version} for manylinux")
    if wheel.stat().st_size > LARGEST:
        fail(f"{wheel.name} has {wheel.stat().st_size} bytes; the limit is {LARGEST}")
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        for name in names:
            if re.search(r"_testing|libpccl|pccl\.h$|\.a$", name):
                fail(f"{name} is in the wheel")
        for wanted in ("/sboms/pccl.cdx.json", "/licenses/THIRD_PARTY.txt", "/licenses/LICENSE"):
            if not any(name.endswith(wanted) for name in names):
                fail(f"the wheel has no {wanted}")
        (bom,) = [name for name in names if name.endswith("/sboms/pccl.cdx.json")]
        components = json.loads(archive.read(bom))["components"]
        wanted_parts = {"OpenSSL", "Asio", "xxHash", "nanobind"}
        if wheel.name.endswith("x86_64.whl"):
            wanted_parts |= {"Zstandard", "zlib"}  # tools/wheel/openssl.sh
        if missing := wanted_parts - {part["name"] for part in components}:
            fail(f"the SBOM lacks {sorted(missing)}")
        (module,) = [name for name in names if re.fullmatch(r"pccl/_core\..*so", name)]
        check_module(Path(archive.extract(module, folder)))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {len(names)} files")


def check_install(wheel: Path, version: str) -> None:
    """Installs the wheel and its dependencies in an environment of its own and starts it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "-q", wheel)
        code = "import sys, pccl; assert not {'torch', 'jax'} & set(sys.modules), 'a framework is loaded'"
        run(python, "-c", code, folder=folder)
        text = run(folder / "venv" / "bin" / "pccl", "--version", folder=folder)
        lines = text.splitlines()
        if lines[0] != f"pccl {version}" or not re.search(
            r"^OpenSSL .+ \(bundled\)$", text, re.MULTILINE
        ):
            fail(f"pccl --version says {text}")
        print(text, end="")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dist", type=Path)
    parser.add_argument("--release", action="store_true")
    options = parser.parse_args()
    version = project_version()
    if options.release:
        check_changelog(version)
    wheels, sdists = sorted(options.dist.glob("*.whl")), sorted(options.dist.glob("*.tar.gz"))
    own = [wheel for wheel in wheels if wheel.stem.endswith(platform.machine())]
    if len(own) != 1 or [path.name for path in sdists] != [f"pccl_collectives-{version}.tar.gz"]:
        fail(f"{options.dist} has {[path.name for path in [*wheels, *sdists]]}")
    for wheel in wheels:
        check_wheel(wheel, version)
    run(sys.executable, "-m", "twine", "check", "--strict", *wheels, sdists[0])
    print("twine check --strict: passed")
    check_install(own[0], version)


if __name__ == "__main__":
    main()
