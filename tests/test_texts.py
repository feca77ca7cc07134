"""Texts of other processes: cut between characters, and readable if they are no UTF-8."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import each, members

import pccl
from pccl import _testing


@given(st.text(), st.integers(0, 40))
def test_a_text_is_cut_between_characters(text: str, most: int) -> None:
    whole = text.encode("utf-8", "replace")
    cut: bytes = _testing.shortened(whole, most)
    assert whole.startswith(cut) and len(cut) <= most
    assert len(cut) == len(whole) or len(cut) > most - 4
    cut.decode()


@given(st.binary(), st.integers(0, 40))
def test_bytes_that_are_no_text_are_cut_too(data: bytes, most: int) -> None:
    cut: bytes = _testing.shortened(data, most)
    assert data.startswith(cut) and min(len(data), most - 3) <= len(cut) <= most


@pytest.mark.parametrize("shift", range(3))
def test_errors_name_keys_of_any_alphabet(shift: int) -> None:
    key = "a" * shift + "層" * 800  # longer than a string of a message

    def call(rank: int, comm: pccl.Communicator) -> Any:
        return pccl.allreduce({key: np.ones(3 + rank, np.float32)}, comm=comm)

    with members(2) as comms:
        for error in each(comms, call):
            assert isinstance(error, pccl.MismatchedCall) and "層層層" in str(error)


@pytest.mark.parametrize("shift", range(2))
def test_a_departure_whose_reason_was_cut_is_told(
    shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason has the first bytes of the call's description."""
    monkeypatch.setenv("PCCL_STRAGGLER_TIMEOUT", "2")
    tree = {"a" * shift + "ö" * 60: np.ones(100, np.float32)}
    told: list[str] = []
    with members(3) as comms:
        pccl.on_membership_change(
            lambda change: told.extend(gone.reason for gone in change.lost), comms[0]
        )
        # The third member makes no call.
        for result in each(comms[:2], lambda _, comm: pccl.allreduce(tree, comm=comm)):
            assert next(iter(result.values()))[0] == 2
        [reason] = told
        assert "ööö" in reason
        with pytest.raises(pccl.Evicted, match="ööö"):
            pccl.allreduce(tree, comm=comms[2])
