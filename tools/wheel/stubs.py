"""stubs.py DIR [PROCESSOR]: link-time libraries of glibc 2.28 and GCC 8.

For a wheel that old systems load. PROCESSOR: x86_64, this machine's, or aarch64. Makes DIR. A link
with `-LDIR` then sees the symbols that a system of 2018 offers, with the versions that they had
there. The objects are those of this machine's compilers. A symbol that is too new makes the link
fail, or comes from a static library:

* glibc: the symbol tables of the package ziglang, and its libc_nonshared.a (fstat, stat, ...).
* compat.c: the few symbols that this machine's headers introduce.
* libstdc++: a stub made from the symbol table of this machine's libstdc++.so.6. The functions that
  came after GCC 8 are taken from libstdc++.a, as Red Hat's toolsets for old systems do.

Exceptions cross between the extension and nanobind's backend, so both must use the same
libstdc++.so.6 at run time. A static libstdc++ would give the extension a second one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# The newest versions that the policy manylinux_2_28 admits.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
KINDS = {"FUNC": "function", "OBJECT": "object", "TLS": "tls_object", "UNIQUE": "gnu_unique_object"}
# ziglang's name of each table, and the name that the loader knows.
LIBRARIES = {
    "libc.so.6": "libc.so.6",
    "libm.so.6": "libm.so.6",
    "libpthread.so.0": "libpthread.so.0",
    "libdl.so.2": "libdl.so.2",
    "librt.so.1": "librt.so.1",
}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
GLIBC = ".".join(map(str, NEWEST["GLIBC"]))
PROCESSOR = sys.argv[2] if len(sys.argv) > 2 else "x86_64"
CC = "aarch64-linux-gnu-gcc" if PROCESSOR == "aarch64" else os.environ.get("CC", "cc")
HERE = Path(__file__).resolve().parent


def run(*command: str | Path, **settings: str) -> str:
    """Runs `command` with `settings` added to the environment; returns what it prints."""
    environment = os.environ | settings
    return subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env=environment
    ).stdout


def symbols_of(library: Path) -> dict[str, tuple[str, str, int]]:
    """Version, kind and size of each symbol that `library` exports and NEWEST admits.

    A symbol that has several versions gets the newest of these. A symbol without a default version
    was withdrawn and is left out.
    """
    found: dict[str, dict[tuple[int, ...], tuple[str, str, int]]] = defaultdict(dict)
    defaults = set()
    for line in run("readelf", "--dyn-syms", "-W", library).splitlines():
        cells = line.split()
        if len(cells) < 8 or cells[3] not in KINDS or cells[6] == "UND":
            continue
        name, _, version = cells[7].partition("@")
        if version.startswith("@"):
            defaults.add(name)
        version = version.lstrip("@")
        family, _, number = version.partition("_")
        if family not in NEWEST or not re.fullmatch(r"[\d.]+", number):
            continue
        numbers = tuple(int(part) for part in number.split("."))
        if numbers <= NEWEST[family]:
            kind = "UNIQUE" if cells[4] == "UNIQUE" else cells[3]
            found[name][numbers] = (version, kind, int(cells[2], 0))
    return {name: versions[max(versions)] for name, versions in found.items() if name in defaults}


def make_stub(folder: Path, name: str, symbols: dict[str, tuple[str, str, int]]) -> None:
    """Makes the shared library `name` in `folder`: `symbols` without code, for the linker alone."""
    lines, nodes = [], defaultdict(list)
    for symbol, (version, kind, size) in sorted(symbols.items()):
        section = {"FUNC": ".text", "TLS": '.section .tdata,"awT",@progbits'}.get(kind, ".data")
        lines += [section, f".globl {symbol}", f".type {symbol}, %{KINDS[kind]}"]
        lines += [f".size {symbol}, {size}", f"{symbol}:", ".skip 8"]
        nodes[version].append(symbol)
    source = folder / f"{name}.s"
    source.write_text("\n".join([*lines, '.section .note.GNU-stack,"",%progbits', ""]))
    versions = folder / f"{name}.map"
    text = [f"{node} {{ global: {'; '.join(names)}; }};" for node, names in sorted(nodes.items())]
    versions.write_text("\n".join([*text, ""]))
    options = ["-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}"]
    run(CC, *options, source, "-o", folder / name)


def glibc(folder: Path) -> None:
    """Makes the stubs of glibc's libraries in `folder`, from ziglang's tables."""
    source = folder / "empty.c"
    source.touch()
    cache = folder / "cache"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", f"{PROCESSOR}-linux-gnu.{GLIBC}"]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    run(*zig, "-shared", source, "-o", folder / "empty.so", **caches)
    names = LIBRARIES | {"libld.so.2": LOADERS[PROCESSOR]}
    for name, soname in names.items():
        (table,) = cache.glob(f"o/*/{name}")
        make_stub(folder, soname, symbols_of(table))
    (nonshared,) = cache.glob("o/*/libc_nonshared.a")
    shutil.copy(nonshared, folder)
    shutil.rmtree(cache)
    objects = []
    for unit in sorted(HERE.glob("compat*.c")):
        target = folder / f"{unit.stem}.o"
        options = ["-c", "-O2", "-fPIC", "-fno-builtin", "-Wall", "-Wextra", "-Werror"]
        run(CC, *options, unit, "-o", target)
        objects.append(target)
    run("ar", "rcs", folder / "libcompat.a", *objects)
    # Before glibc 2.34, threads and dlopen were in libraries of their own.
    apart = " ".join(list(names.values())[2:])
    script = f"GROUP ( libc.so.6 AS_NEEDED ( {apart} ) libc_nonshared.a libcompat.a )\n"
    for name in ["libc.so", "libpthread.so", "libdl.so", "librt.so"]:
        (folder / name).write_text(script)
    (folder / "libm.so").write_text("INPUT ( libm.so.6 )\n")


def libstdcxx(folder: Path) -> None:
    """Makes the stub of libstdc++ in `folder`; what it lacks comes from libstdc++.a."""
    library = Path(run(CC, "-print-file-name=libstdc++.so.6").strip())
    archive = Path(run(CC, "-print-file-name=libstdc++.a").strip()).resolve()
    make_stub(folder, "libstdc++.so.6", symbols_of(library))
    (folder / "libstdc++.so").write_text(f"INPUT ( libstdc++.so.6 {archive} )\n")


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    glibc(folder)
    libstdcxx(folder)
    print(f"stubs: glibc {GLIBC} and GCC 8 in {folder}")


if __name__ == "__main__":
    main()
