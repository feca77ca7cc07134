"""How peers of one host find each other, and how often they try."""

from __future__ import annotations

import pytest

from pccl import _testing

pytestmark = pytest.mark.shared_memory


def test_many_that_connect_at_once_all_share_memory() -> None:
    assert _testing.connect_at_once(200) == (200, 0)


def test_who_loses_a_connection_again_and_again_tries_less_often() -> None:
    assert _testing.redial_pauses([0.0, 0.1, 1.0, 9.0]) == pytest.approx([0.5, 1, 2, 4])
    assert _testing.redial_pauses([1.0, 1.0, 60.0, 1.0]) == pytest.approx([0.5, 1, 0.5, 1])
    assert _testing.redial_pauses([0.0] * 10)[-1] == pytest.approx(30)
