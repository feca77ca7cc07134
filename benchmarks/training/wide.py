"""Runs in the wide-area lab: its master, and the options of its links."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab import Lab


def start_master(lab: Lab, env: Mapping[str, str]) -> str:
    """Starts a master on the first host. It ends with the lab. Returns its address."""
    command = [sys.executable, "-P", "-m", "pccl", "master", "--insecure"]
    command += ["--listen", f"{lab.address(0)}:0"]
    master = lab.popen(0, command, env, stdout=subprocess.PIPE, text=True)
    assert master.stdout is not None
    address: str = master.stdout.readline().split()[-1]
    return address


def add_link_options(parser: argparse.ArgumentParser) -> None:
    """The links of all hosts, and what takes time beside them."""
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt", type=float, default=50.0, help="ms")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round's inner steps")
