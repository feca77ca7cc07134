"""Jobs of torch.distributed: ranks that are real processes and meet at a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from workers import Program, Worker


class Job:
    """Ranks of one torch job, each a process."""

    def __init__(self, store: Path | int) -> None:
        self._store = store
        self.workers: list[Worker] = []

    def start(self, size: int, program: Program, **env: str) -> list[Worker]:
        self.workers = [
            Worker(
                program,
                RANK=str(rank),
                SIZE=str(size),
                STORE=str(self._store),
                GLOO_SOCKET_IFNAME="lo",
                **env,
            )
            for rank in range(size)
        ]
        return self.workers


@contextmanager
def torch_job(store: Path | int) -> Iterator[Job]:
    """A job with this store, a file or a port. Its ranks are gone at the end."""
    made = Job(store)
    try:
        yield made
    finally:
        for worker in made.workers:
            worker.destroy()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with torch_job(tmp_path / "store") as made:
        yield made
