"""Compiles the rooms of a build folder of CMake in few units, and links the C library of all.

    compile_at_once.py BUILD COMPILER [TARGET...]

With targets, it compiles only these, and links nothing.

Most of the time of a unit goes into the headers of the standard library and of Asio. So the units
that CMake makes of whole rooms (PCCL_UNITY) become one unit. Files that CMake compiles alone stay
alone.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def units(build: Path, targets: list[str]) -> list[list[str]]:
    """The commands to compile these targets, or everything."""
    merged: dict[tuple[str, ...], list[str]] = {}
    alone = []
    seen = set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        at = words.index("-o")
        target = Path(words[at + 1]).parts[1].removesuffix(".dir")
        seen.add(target)
        if targets and target not in targets:
            continue
        options = tuple(words[:at])  # then: -o OBJECT -c SOURCE
        if Path(entry["file"]).name.startswith("unity_"):
            merged.setdefault(options, []).append(entry["file"])
        else:
            alone.append([*options, "-o", str(build / f"alone-{len(alone)}.o"), "-c", words[-1]])
    made = []
    for number, (options, files) in enumerate(merged.items()):
        unit = build / f"unit-{number}.cpp"
        unit.write_text("".join(f'#include "{file}"\n' for file in files))
        made.append([*options, "-o", str(unit.with_suffix(".o")), "-c", str(unit)])
    if not made or (missing := set(targets) - seen):
        raise SystemExit(f"nothing to compile for {sorted(missing) if made else build}")
    return made + alone


def main() -> int:
    build, compiler, targets = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:]
    commands = units(build, targets)
    with ThreadPoolExecutor(2) as pool:
        failed = [done for done in pool.map(subprocess.run, commands) if done.returncode]
    if failed or targets:
        return int(bool(failed))
    objects = [command[-3] for command in commands]
    library = str(build / "libpccl.dylib")
    return subprocess.run([compiler, "-shared", "-o", library, *objects]).returncode


if __name__ == "__main__":
    sys.exit(main())
