"""Checks the #include lines under cpp/pccl/ against CMakeLists.txt.

A room may include the rooms that its `pccl_room` line allows. A pure room (PCCL_PURE_ROOMS) may
include pure rooms and os only, and no header of Asio, OpenSSL or sockets. Headers that exist on
Linux only, and tests for a system, are in os alone.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NETWORK = re.compile(
    r"asio|openssl/|sys/(socket|un|epoll)\.h|netinet/|netdb\.h|ifaddrs\.h|poll\.h"
    r"|pccl/os/(channel|socket|tcp)\.h"
)
SYSTEM = re.compile(
    r"\s*#.*(<linux/|<sys/(epoll|eventfd|inotify|prctl|random|sysinfo|timerfd)\.h>"
    r"|__linux__|__APPLE__|_WIN32)"
)
# digest/ hashes bytes in memory; the hash is OpenSSL's.
EXCEPTIONS = {("cpp/pccl/digest/ticket.cpp", "openssl/evp.h")}


def allowed_rooms(cmake: str) -> dict[str, set[str]]:
    """Room -> every room it may include, its own among them."""
    allowed: dict[str, set[str]] = {}
    for line in re.findall(r"^ *pccl_room\((.*?)\)", cmake, re.MULTILINE):
        room, *uses = line.split()
        allowed[room] = {room}.union(*(allowed[use] for use in uses))
    return allowed


def pure_rooms(cmake: str) -> set[str]:
    found = re.search(r"^set\(PCCL_PURE_ROOMS (.*?)\)$", cmake, re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def main() -> int:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    allowed, pure = allowed_rooms(cmake), pure_rooms(cmake)
    failures = [
        f"room {room} is pure and may not use {', '.join(sorted(uses - pure - {'os'}))}"
        for room, uses in allowed.items()
        if room in pure and uses - pure - {"os"}
    ]
    checked = {"bindings"}  # an extension module, not a library: it may include every room
    for room, uses in allowed.items():
        checked.add(room)
        for path in sorted((ROOT / "cpp" / "pccl" / room).rglob("*.*")):
            name = str(path.relative_to(ROOT))
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if room != "os" and SYSTEM.match(line):
                    failures.append(f"{name}:{number}: only os may be of one system: {line}")
                found = re.match(r"\s*#\s*include\s+[<\"]([^>\"]+)", line)
                if not found:
                    continue
                used = re.match(r"pccl/(\w+)/", found[1])
                if used and used[1] not in uses:
                    failures.append(f"{name}:{number}: room {room} may not use room {used[1]}")
                if room in pure and NETWORK.match(found[1]) and (name, found[1]) not in EXCEPTIONS:
                    failures.append(f"{name}:{number}: room {room} is pure; not {found[1]}")
    folders = {path.name for path in (ROOT / "cpp" / "pccl").iterdir() if path.is_dir()}
    failures += [f"cpp/pccl/{name}: no pccl_room line" for name in sorted(folders - checked)]
    print("\n".join(failures) if failures else f"rooms: {len(allowed)} keep their order")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
