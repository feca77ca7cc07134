"""What `pccl doctor` says of the place where it runs, by made-up root folders and for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import pccl
from pccl.tools.places import Place, findings, here
from pccl.tools.screen import Check

GIB = 1 << 30
V2 = {"proc/self/cgroup": "0::/\n"}
MEMORY = {"proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n"}
KINDS = {
    "Colab", "Kaggle", "Ray worker", "SLURM", "Kubernetes", "container", "WSL", "AWS", "GCP",
    "Azure",
}  # fmt: skip


def found(
    root: Path, files: Mapping[str, str] | None = None, *, cores: int = 64, **environ: str
) -> dict[str, Check]:
    """The findings by name, of a root folder with these files."""
    for path, text in (files or {}).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    checks = list(findings(Place(environ, root, cores)))
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_a_plain_machine_has_no_findings(tmp_path: Path) -> None:
    plain = {
        **MEMORY,
        "proc/self/cgroup": "0::/user.slice/session-1.scope\n",
        "proc/self/mountinfo": "25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=33554432k\n",
        "proc/sys/kernel/osrelease": "6.12.9-amd64\n",
        "sys/class/dmi/id/sys_vendor": "Microsoft Corporation\n",  # a laptop, or Hyper-V
        "sys/class/dmi/id/product_name": "Virtual Machine\n",
        "sys/fs/cgroup/user.slice/session-1.scope/memory.max": "max\n",
        "sys/fs/cgroup/user.slice/session-1.scope/memory.current": "1000\n",
        "sys/fs/cgroup/user.slice/session-1.scope/cpu.max": "max 100000\n",
    }
    assert found(tmp_path, plain) == {}
    assert found(tmp_path / "empty") == {}


@pytest.mark.parametrize(
    ("kinds", "files", "environ"),
    [
        (["SLURM"], {}, {"SLURM_JOB_ID": "42"}),
        (["Kubernetes"], {".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}),
        (["Kubernetes"], {"var/run/secrets/kubernetes.io/serviceaccount/token": "t"}, {}),
        (["container"], {".dockerenv": ""}, {}),
        (["container"], {"run/.containerenv": 'engine="podman-5.4.2"\n'}, {}),
        (["container"], {"proc/1/cgroup": "4:memory:/docker/0123\n"}, {}),
        (["container"], {}, {"container": "lxc"}),
        (["Ray worker"], {}, {"RAY_RAYLET_PID": "7", "RAY_JOB_ID": "01000000"}),
        (["Colab", "container"], {".dockerenv": ""}, {"COLAB_RELEASE_TAG": "release-colab_2026"}),
        (["Kaggle"], {}, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}),
        (["AWS"], {"sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, {}),
        (["AWS"], {"sys/class/dmi/id/bios_version": "4.11.amazon\n"}, {}),
        (["GCP"], {"sys/class/dmi/id/product_name": "Google Compute Engine\n"}, {}),
        (
            ["Azure"],
            {"sys/class/dmi/id/chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"},
            {},
        ),
        (["WSL"], {"proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n"}, {}),
        (
            ["Ray worker", "SLURM", "container", "GCP"],
            {".dockerenv": "", "sys/class/dmi/id/product_name": "Google Compute Engine\n"},
            {"SLURM_JOB_ID": "42", "RAY_RAYLET_PID": "7"},
        ),
    ],
)
def test_each_place_is_told_from_its_files_and_variables(
    kinds: list[str], files: dict[str, str], environ: dict[str, str], tmp_path: Path
) -> None:
    checks = found(tmp_path, files, **environ)
    assert [name for name in checks if name in KINDS] == kinds
    assert all(checks[name].verdict == "info" for name in kinds)
    assert checks["listens at"].text == "all addresses, any free port (PCCL_PORT)"


def test_engines_of_containers_are_named(tmp_path: Path) -> None:
    docker = found(tmp_path / "docker", {".dockerenv": ""})
    podman = found(tmp_path / "podman", {"run/.containerenv": ""}, PCCL_DRAIN_SECONDS="8")
    assert docker["container"].text.startswith("Docker: ")
    assert "PCCL_DRAIN_SECONDS is 25" in docker["container"].text
    assert podman["container"].text.startswith("Podman: ")
    assert "PCCL_DRAIN_SECONDS is 8" in podman["container"].text


def test_a_pod_needs_a_status_that_tells_a_preemption_from_the_end(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    missing = found(tmp_path, **pod)["exit status"]
    assert missing.verdict == "warn" and "PCCL_SIGTERM_STATUS" in missing.text
    assert found(tmp_path, **pod, PCCL_SIGTERM_STATUS="75")["exit status"].verdict == "ok"
    assert found(tmp_path, SLURM_JOB_ID="42")["exit status"].verdict == "info"
    assert "exit status" not in found(tmp_path, RAY_RAYLET_PID="7")


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "[::1]"])
def test_a_loopback_address_warns(bind: str, tmp_path: Path) -> None:
    check = found(tmp_path, SLURM_JOB_ID="42", PCCL_BIND=bind, PCCL_PORT="5000")["listens at"]
    assert check.verdict == "warn"
    assert check.text.startswith(f"{bind}, port 5000: ")
    assert found(tmp_path, SLURM_JOB_ID="42", PCCL_BIND="10.1.0.7")["listens at"].verdict == "info"


def test_the_least_limit_of_the_cgroups_of_version_2_counts(tmp_path: Path) -> None:
    files = {
        **MEMORY,
        "proc/self/cgroup": "0::/kubepods/pod1/app\n",
        "sys/fs/cgroup/kubepods/pod1/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/kubepods/pod1/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/kubepods/pod1/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        "sys/fs/cgroup/kubepods/pod1/app/memory.max": "max\n",
        "sys/fs/cgroup/kubepods/pod1/app/memory.current": "5\n",
        "sys/fs/cgroup/kubepods/pod1/cpu.max": "1000000 100000\n",
        "sys/fs/cgroup/kubepods/pod1/app/cpu.max": "max 100000\n",
    }
    checks = found(tmp_path, files)
    assert checks["memory"].verdict == "ok"
    assert checks["memory"].text.startswith("1.5 GiB free of the cgroup's 4.0 GiB")
    assert checks["processors"] == Check("processors", "ok", "quota of 10 of 64")


def test_limits_of_cgroups_of_version_1_count(tmp_path: Path) -> None:
    files = {
        **MEMORY,
        # A container sees its path on the host, and its own files at the top.
        "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu,cpuacct:/docker/0123\n0::/docker/0123\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2 - (100 << 20)}\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 7\ntotal_inactive_file 0\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        ".dockerenv": "",
    }
    checks = found(tmp_path, files)
    assert checks["memory"].verdict == "warn"
    assert checks["memory"].text.startswith("100 MiB free of the cgroup's 512 MiB; ")
    assert "256 MiB" in checks["memory"].text
    assert checks["processors"].verdict == "warn"
    assert "quota of 2.5 of 64; pccl may use 8 threads" in checks["processors"].text
    assert checks["processors"].text.endswith("set PCCL_THREADS=1")
    smaller = found(tmp_path, PCCL_BUFFER_BYTES=str(64 << 20), PCCL_THREADS="2")
    assert smaller["memory"].verdict == smaller["processors"].verdict == "ok"


def test_a_cgroup_without_limits_of_version_1_has_no_findings(tmp_path: Path) -> None:
    files = {
        **MEMORY,
        "proc/self/cgroup": "4:memory:/\n3:cpu:/\n1:name=systemd:/\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/unified/cgroup.procs": "1\n",
    }
    assert found(tmp_path, files) == {}


def test_little_free_memory_is_told_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemTotal: {8 << 20} kB\nMemAvailable: {100 << 10} kB\n"}
    check = found(tmp_path, files)["memory"]
    assert check.verdict == "warn"
    assert check.text.startswith("100 MiB free of 8.0 GiB; ")


def test_a_small_dev_shm_is_told_with_what_it_is_for(tmp_path: Path) -> None:
    below = "25 24 0:23 / /dev rw - tmpfs tmpfs rw,size=65536k,mode=755\n"
    mounts = below + "30 25 0:27 / /dev/shm rw,nosuid shared:1 - tmpfs shm rw,size=65536k\n"
    check = found(tmp_path, {"proc/self/mountinfo": mounts})["/dev/shm"]
    assert check.verdict == "info"
    assert check.text.startswith("64 MiB; pccl does not use it")
    assert found(tmp_path, {"proc/self/mountinfo": below}) == {}
    large = mounts + "31 30 0:28 / /dev/shm rw - tmpfs shm rw,size=2g\n"  # hides the other one
    assert found(tmp_path, {"proc/self/mountinfo": large}) == {}


def test_settings_that_are_no_numbers_and_odd_files_do_no_harm(tmp_path: Path) -> None:
    odd = {
        "proc/self/cgroup": "odd\n::\n0::/\n",
        "proc/self/mountinfo": "\nodd\n1 2 0:1 / /dev/shm rw shared\n",
        "proc/meminfo": "MemTotal: much\nMemAvailable: \u00b2 kB\n",
        "sys/fs/cgroup/cpu.max": "\n",
        "sys/fs/cgroup/memory.max": "\n",
    }
    assert found(tmp_path, odd, PCCL_THREADS="many", PCCL_PORT="x", SLURM_JOB_ID="1").keys() == {
        "SLURM", "exit status", "listens at",
    }  # fmt: skip


def test_the_place_of_this_process_is_looked_at() -> None:
    place = here()
    assert place.root == Path("/") and place.environ is os.environ
    assert 1 <= place.cores <= (os.cpu_count() or 1)
    for check in findings(place):
        assert check.verdict in ("ok", "warn", "info") and check.text


def test_the_doctor_prints_the_findings() -> None:
    environ = {**os.environ, "SLURM_JOB_ID": "4217", "PCCL_DRAIN_SECONDS": "20"}
    with pccl.MasterNode("127.0.0.1:0") as master:
        done = subprocess.run(
            [sys.executable, "-m", "pccl", "doctor", master.address, "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            env=environ,
        )
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["SLURM"]["text"].startswith("job 4217: SIGTERM")
    assert "PCCL_DRAIN_SECONDS is 20" in checks["SLURM"]["text"]
    assert list(checks).index("SLURM") > list(checks).index("shared memory")
