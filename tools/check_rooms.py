"""Holds the #include lines under cpp/ to the rooms that CMakeLists.txt's pccl_room lines allow."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def allowed_rooms(cmake: str) -> dict[str, set[str]]:
    """Room -> every room it may include, its own among them."""
    allowed: dict[str, set[str]] = {}
    for line in re.findall(r"^ *pccl_room\((.*)\)$", cmake, re.MULTILINE):
        room, *uses = line.split()
        allowed[room] = {room}.union(*(allowed[use] for use in uses))
    return allowed


def main() -> int:
    allowed = allowed_rooms((ROOT / "CMakeLists.txt").read_text())
    failures = []
    for room, uses in allowed.items():
        for path in sorted((ROOT / "cpp" / "pccl" / room).glob("*.*")):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                found = re.match(r'\s*#\s*include\s+"pccl/(\w+)/', line)
                if found and found[1] not in uses:
                    place = f"{path.relative_to(ROOT)}:{number}"
                    failures.append(f"{place}: room {room} may not use room {found[1]}")
    print("\n".join(failures) if failures else f"rooms: {len(allowed)} keep their order")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
