"""What every test shares: loopback only, reproducible hypothesis, and which tests a plain run leaves out."""

import os
import signal

import hypothesis
import pytest

# Before any engine object is made, and inherited by every process a test starts.
os.environ["PCCL_BIND"] = "127.0.0.1"
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this run cannot or should not do, with the reason."""
    not_root = pytest.mark.skip(reason="needs root")
    not_soak = pytest.mark.skip(reason="runs only in `make soak`")
    for item in items:
        if "root" in item.keywords and os.geteuid() != 0:
            item.add_marker(not_root)
        if "soak" in item.keywords and os.environ.get("PCCL_SOAK") != "1":
            item.add_marker(not_soak)
