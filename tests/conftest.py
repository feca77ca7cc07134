"""Fixtures and settings of all tests, and which tests a plain run leaves out."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import hypothesis
import members as local
import overdue
import pytest
from clibrary import installed, library  # noqa: F401  # fixtures
from groups import group, pair  # noqa: F401
from namespaces import Lab, namespaces
from torch_jobs import job  # noqa: F401
from workers import Run, running

from pccl import _core

# `make test-integrations` runs these in an environment of their own.
collect_ignore = ["integrations"]

# Before any engine object is made, and inherited by every process a test starts.
os.environ["PCCL_BIND"] = "127.0.0.1"
# Results must not depend on what the machine's kernel has.
os.environ["PCCL_TCP_CONGESTION"] = "system"
# Tests read lines as a user at a terminal sees them.
os.environ.setdefault("PCCL_LOG_FORMAT", "short")
# A shell's background jobs ignore SIGINT, and so would every process a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: on a busy two-core machine one example may take long and mean nothing.
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "soak", deadline=None, database=None, print_blob=True, max_examples=20_000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(overdue)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # The test modules import torch, JAX and more: millions of objects, nearly all of which live to
    # the end. Without this the collector reads them again and again while they are made (half a
    # minute of CPU time for each pytest process), and later in each gc.collect() of a test.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """A master whose peers the test starts, all as processes. `pytest.mark.env`: their settings."""
    env: dict[str, str] = {}
    for mark in reversed(list(request.node.iter_markers("env"))):  # the test's own mark comes last
        env.update(mark.kwargs)
    with running(**env) as made:
        yield made


@pytest.fixture
def members() -> Iterator[local.Members]:
    """Makes that many members of one run in this process, as members.members does."""
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(local.members(count, **options))


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Makes that many hosts on one network, as namespaces.namespaces does."""
    with ExitStack() as stack:
        yield lambda count, *versions: stack.enter_context(namespaces(count, versions))


NO_SHARED_MEMORY = "this build shares no memory between processes"


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How peers of this test reduce: in shared memory, as peers of one host do, or over TCP.

    Modules whose tests run with both say `usefixtures("transport")`, which sets it before `run`.
    """
    if request.param == "shm" and not _core.shares_memory():
        pytest.skip(NO_SHARED_MEMORY)
    monkeypatch.setenv("PCCL_SHM", "1" if request.param == "shm" else "0")
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this run cannot or should not do, with the reason."""
    not_root = pytest.mark.skip(reason="needs root")
    not_soak = pytest.mark.skip(reason="runs only in `make soak`")
    not_shared = pytest.mark.skip(reason=NO_SHARED_MEMORY)
    for item in items:
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(not_root)
        if item.get_closest_marker("shared_memory") and not _core.shares_memory():
            item.add_marker(not_shared)
        if "soak" in item.keywords and os.environ.get("PCCL_SOAK") != "1":
            item.add_marker(not_soak)
