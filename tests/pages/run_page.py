"""Runs the Python blocks of a page, in order and in one namespace: run_page.py SETUP PAGE.

The process is the only peer of a run with a master of its own; the page's addresses and numbers of
peers do not count. SETUP is a file that makes the names that the page takes for granted; it is run
anew before each block. An error's traceback names the page and its line.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pccl

sys.path.insert(0, str(Path(__file__).parents[1]))
from pages.blocks import blocks  # noqa: E402

init = pccl.init  # as it is


def alone(*_: Any, min_peers: int | None = None, **keywords: Any) -> pccl.Communicator:
    """`pccl.init` for a run of one peer, also when this process is in a run already."""
    if pccl.is_initialized():
        pccl.shutdown()
    return init(timeout=20, **keywords)


class Alone(pccl.Communicator):
    """In a group of its own, not that of `pccl.init`."""

    def __init__(self, *_: Any, **keywords: Any) -> None:
        super().__init__(os.environ["PCCL_MASTER"], **{"peer_group": 1, **keywords})


def torch_alone() -> None:
    """Has `torch.distributed` make groups of this process alone, with Gloo in place of NCCL."""
    dist: Any = importlib.import_module("torch.distributed")
    make = dist.init_process_group

    def make_alone(backend: str, **_: Any) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        backend = "gloo" if backend == "nccl" else backend
        make(backend, store=dist.HashStore(), rank=0, world_size=1)

    dist.init_process_group = make_alone


def main(setup: Path, page: Path) -> None:
    text = page.read_text()
    prepare = compile(setup.read_text() if setup.exists() else "", str(setup), "exec")
    if "torch.distributed" in text:
        torch_alone()
    pccl.init, pccl.Communicator = alone, Alone  # type: ignore[misc]
    with pccl.MasterNode("127.0.0.1:0") as master:
        os.environ |= {"PCCL_MASTER": master.address, "PCCL_BIND": "127.0.0.1"}
        names: dict[str, Any] = {"__name__": "__main__"}
        for code in python(text, str(page)):
            if not pccl.is_initialized():
                pccl.init()
            exec(prepare, names)
            exec(code, names)
        pccl.shutdown()


def python(text: str, page: str) -> Iterator[Any]:
    for block in blocks(text):
        if block.language == "python" and not block.reason and not block.run_as_program(page):
            yield compile("\n" * block.line + block.text, page, "exec")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
