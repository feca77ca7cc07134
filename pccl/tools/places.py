"""The places where peers run, and their meaning: schedulers, containers, notebooks and clouds.

`pccl doctor` prints the findings. They come from the environment and from files. Nothing is asked
over the network.

Longer than 200 lines, since each place has a text of its own, and cgroups have two versions.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pccl.tools.screen import Check

__all__ = ["Place", "findings", "here"]

_MIB = 1 << 20
_BUFFER_BYTES = 256 * _MIB  # PCCL_BUFFER_BYTES
_MOST_THREADS = 8  # of PCCL_THREADS, when the library decides
_SMALL_SHM = 1024 * _MIB
_DRAIN_SECONDS = "25"  # PCCL_DRAIN_SECONDS
_AZURE = "7783-7084-3265-9085-8269-3286-77"  # chassis of its machines; Hyper-V elsewhere has others
_CLOUDS = {"Amazon EC2": "AWS", "Google Compute Engine": "GCP"}
_NOTICES = {  # how a cloud tells a spot machine that it takes it back
    "AWS": "two minutes before, in the metadata alone",
    "GCP": "30 s before, and the system shuts down, with SIGTERM",
    "Azure": "30 s before, in the metadata alone",
}


class Place(NamedTuple):
    """The sources of the findings.

    Attributes:
        environ: The environment's variables.
        root: The folder that counts as `/`.
        cores: Processors that this process may run on, whatever quota it has.
    """

    environ: Mapping[str, str]
    root: Path
    cores: int

    def text(self, path: str) -> str:
        """A file's content without the blanks around it; "" if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    def has(self, *paths: str) -> bool:
        """Whether one of the files or folders exists."""
        return any(os.path.lexists(self.root / path) for path in paths)

    def number(self, variable: str, default: int) -> int:
        """A setting. One that is no number counts as not set: joining the run reports it."""
        try:
            return int(self.environ.get(variable, "")) or default
        except ValueError:
            return default


def here() -> Place:
    """The place of this process."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Place(os.environ, Path("/"), len(affinity(0)) if affinity else os.cpu_count() or 1)


def findings(place: Place) -> Iterator[Check]:
    """A line for each thing that matters here. A plain machine without limits has none."""
    kinds = list(_kinds(place))
    for name, text in kinds:
        yield Check(name, "info", text)
    yield from _status(place, [name for name, _ in kinds])
    if kinds:
        yield _listens(place)
    yield from _memory(place)
    yield from _processors(place)
    size = _shm_bytes(place)
    if size is not None and size < _SMALL_SHM:
        text = (
            f"{_shown(size)}; pccl does not use it. DataLoader workers of torch do "
            "(docker run --shm-size, an emptyDir of medium Memory)"
        )
        yield Check("/dev/shm", "info", text)


def _kinds(place: Place) -> Iterator[tuple[str, str]]:
    """The names of what this process runs in, and what each means. The innermost comes first."""
    given = place.environ
    drain = given.get("PCCL_DRAIN_SECONDS") or _DRAIN_SECONDS
    notebook = "Colab" if "COLAB_RELEASE_TAG" in given else ""
    notebook = "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in given else notebook
    if notebook:
        text = (
            "nobody can connect to this machine: links are dialled from here, or the master "
            "relays. The machine may be taken back at any time: save checkpoints elsewhere"
        )
        yield notebook, text
    if "RAY_RAYLET_PID" in given:
        text = (
            "Ray handles SIGTERM, so pccl leaves it alone, and Ray ends actors without a notice: "
            "the others see a loss. Ray's object store counts as memory of this machine, too"
        )
        yield "Ray worker", text
    if job := given.get("SLURM_JOB_ID"):
        text = (
            f"job {job}: SIGTERM, and SIGKILL after KillWait (30 s by default; PCCL_DRAIN_SECONDS "
            f"is {drain}). Start programs by srun: a batch script alone gets no SIGTERM"
        )
        yield "SLURM", text
    pod = "KUBERNETES_SERVICE_HOST" in given
    if pod or place.has("run/secrets/kubernetes.io", "var/run/secrets/kubernetes.io"):
        text = (
            "SIGTERM, and SIGKILL after terminationGracePeriodSeconds (30 s by default; "
            f"PCCL_DRAIN_SECONDS is {drain}). Pods connect to each other at their own addresses, "
            "unless a NetworkPolicy forbids it"
        )
        yield "Kubernetes", text
    elif engine := _container(place):
        text = f"{engine}: the file system and limits of the container count, not the machine's"
        if engine in ("Docker", "Podman"):
            text = (
                f"{engine}: `stop` sends SIGTERM, and SIGKILL after 10 s unless -t says otherwise "
                f"(PCCL_DRAIN_SECONDS is {drain}). Other machines reach a published port (-p, "
                "PCCL_PORT, PCCL_ADVERTISE), or any port with --network host"
            )
        yield "container", text
    release = place.text("proc/sys/kernel/osrelease").lower()
    if "WSL_DISTRO_NAME" in given or "microsoft" in release:
        text = "the firewall of Windows has to admit the master's port and those of the peers"
        if "microsoft-standard" in release:  # version 2, a virtual machine
            text = (
                "other machines cannot connect, unless .wslconfig has networkingMode=mirrored: "
                "links are dialled from here, or the master relays"
            )
        yield "WSL", text
    elif cloud := _cloud(place):
        text = (
            "firewall rules have to admit TCP to the master's port and those of the peers "
            "(PCCL_PORT); peers elsewhere need the public address (PCCL_ADVERTISE). A spot machine "
            f"gets a notice {_NOTICES[cloud]}"
        )
        yield cloud, text


def _container(place: Place) -> str:
    """The engine of the container around this process; "" outside of one."""
    if place.has("run/.containerenv"):
        return "Podman"
    if place.has(".dockerenv"):
        return "Docker"
    groups = place.text("proc/1/cgroup") + place.text("proc/self/cgroup")
    for part, engine in {
        "libpod": "Podman",
        "docker": "Docker",
        "containerd": "containerd",
    }.items():
        if part in groups:
            return engine
    return place.environ.get("container", "")  # systemd's interface of containers


def _cloud(place: Place) -> str:
    """The cloud whose virtual machine this is, by the strings of its firmware; "" if unknown."""
    names = ("sys_vendor", "product_name", "bios_vendor")
    strings = [place.text(f"sys/class/dmi/id/{name}") for name in names]
    for part, cloud in _CLOUDS.items():
        if part in strings:
            return cloud
    if "amazon" in place.text("sys/class/dmi/id/bios_version").lower():  # machines with Xen
        return "AWS"
    return "Azure" if place.text("sys/class/dmi/id/chassis_asset_tag") == _AZURE else ""


def _status(place: Place, kinds: list[str]) -> Iterator[Check]:
    """The exit status of a peer that SIGTERM asked to leave, as a scheduler reads it."""
    if not {"Kubernetes", "SLURM"} & set(kinds):
        return
    if given := place.environ.get("PCCL_SIGTERM_STATUS"):
        yield Check("exit status", "ok", f"{given} after SIGTERM (PCCL_SIGTERM_STATUS)")
    elif "Kubernetes" in kinds:
        text = (
            "PCCL_SIGTERM_STATUS is not set: a Job takes a peer that has left because of SIGTERM "
            "for one whose work is done, and does not replace it; 75 tells them apart"
        )
        yield Check("exit status", "warn", text)
    else:
        text = "0 after SIGTERM, as when the work is done; PCCL_SIGTERM_STATUS=75 tells them apart"
        yield Check("exit status", "info", text)


def _listens(place: Place) -> Check:
    """Where peers connect to this one."""
    bind = place.environ.get("PCCL_BIND", "")
    port = place.number("PCCL_PORT", 0)
    text = f"{bind or 'all addresses'}, {f'port {port}' if port else 'any free port (PCCL_PORT)'}"
    if bind == "localhost" or bind.startswith("127.") or bind.strip("[]") == "::1":
        return Check("listens at", "warn", f"{text}: only peers of this machine can connect to it")
    return Check("listens at", "info", text)


def _memory(place: Place) -> Iterator[Check]:
    """Free memory, where a cgroup limits it or little is left."""
    names = ("MemTotal:", "MemAvailable:")
    lines = [line.split() for line in place.text("proc/meminfo").splitlines()]
    known = {words[0]: words[1] for words in lines if len(words) > 1 and words[1].isdecimal()}
    if not known.keys() >= set(names):
        return
    total, free = (int(known[name]) * 1024 for name in names)
    limit = total
    for version, folder in _cgroups(place, "memory"):
        # Pages of files that were not used for a while: the kernel drops them when it must.
        cache = ("total_inactive_file", "inactive_file")[version]
        most = place.text(f"{folder}/{('memory.limit_in_bytes', 'memory.max')[version]}")
        used = place.text(f"{folder}/{('memory.usage_in_bytes', 'memory.current')[version]}")
        if most.isdecimal() and used.isdecimal():  # else "max"
            dropped = _field(place.text(f"{folder}/memory.stat"), cache)
            free = min(free, max(0, int(most) - int(used) + dropped))
            limit = min(limit, int(most))
    need = place.number("PCCL_BUFFER_BYTES", _BUFFER_BYTES)
    whose = "of the cgroup's" if limit < total else "of"
    text = f"{_shown(free)} free {whose} {_shown(limit)}"
    if free < need:
        text += f"; pccl may keep {_shown(need)} of received data (PCCL_BUFFER_BYTES)"
        yield Check("memory", "warn", text)
    elif limit < total:
        yield Check("memory", "ok", f"{text}; memory that peers share counts, too")


def _processors(place: Place) -> Iterator[Check]:
    """The quota of processor time against the threads of one communicator."""
    quota = math.inf
    for version, folder in _cgroups(place, "cpu"):
        if version:
            time, _, period = place.text(f"{folder}/cpu.max").partition(" ")
        else:
            time = place.text(f"{folder}/cpu.cfs_quota_us")
            period = place.text(f"{folder}/cpu.cfs_period_us")
        if time.isdecimal() and period.isdecimal() and int(period) > 0:  # else "max", or -1
            quota = min(quota, int(time) / int(period))
    if quota >= place.cores:
        return
    usual = min(max(place.cores // 2, 1), _MOST_THREADS)
    threads = place.number("PCCL_THREADS", usual)
    text = f"quota of {quota:g} of {place.cores}"
    if threads > max(1, quota):
        text += f"; pccl may use {threads} threads between hosts, and the quota stops them all: "
        yield Check("processors", "warn", f"{text}set PCCL_THREADS={max(1, int(quota / 2))}")
    else:
        yield Check("processors", "ok", text)


def _cgroups(place: Place, controller: str) -> Iterator[tuple[int, str]]:
    """Each cgroup around this process: 1 for version 2, 0 for version 1, and its folder.

    A container may see the path that its cgroup has on the host, and only its own files, at the
    top. So folders that do not exist are left out.
    """
    for line in place.text("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version, tops = 1, ["sys/fs/cgroup"]
        elif controller in controllers.split(","):
            version, tops = 0, [f"sys/fs/cgroup/{name}" for name in (controllers, controller)]
        else:
            continue
        top = next((top for top in tops if place.has(top)), None)
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            folder = "/".join([str(top), *parts[:depth]])
            if top and place.has(folder):
                yield version, folder


def _field(text: str, name: str) -> int:
    """The number after the name in lines of `name number`; 0 if there is none."""
    found = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return int(found[name]) if found.get(name, "").isdecimal() else 0


def _shm_bytes(place: Place) -> int | None:
    """The size that /dev/shm was mounted with; None if it has none."""
    size = None
    for line in place.text("proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        if mount.split()[4:5] != ["/dev/shm"]:
            continue
        for option in (system.split() or [""])[-1].split(","):
            name, _, value = option.partition("=")
            if name == "size" and value.rstrip("kmg").isdecimal():
                unit = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}.get(value[-1], 1)
                size = int(value.rstrip("kmg")) * unit  # of the last one, which hides the others
    return size


def _shown(size: int) -> str:
    mib = size / _MIB
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
