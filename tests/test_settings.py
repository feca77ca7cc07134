"""Settings: what is refused, when, and with which name."""

from __future__ import annotations

from typing import Any

import pytest
from programs import several_masters
from workers import Run

import pccl
from pccl import _settings


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PCCL_STRIPES", "999"),
        ("PCCL_LOG_LEVEL", "LOUD"),
        ("PCCL_PORT", "70000"),
        ("PCCL_TIMEOUT", "0"),
        ("PCCL_ADVERTISE", "a b"),
        ("PCCL_ADVERTISE", "host:99999999"),
        ("PCCL_ADVERTISE", ":5"),
        ("PCCL_ADVERTISE", ",".join(f"host{index}" for index in range(32))),
    ],
)
def test_a_communicator_refuses_what_its_engine_would(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    for make in (pccl.Communicator, pccl.init):
        with pytest.raises(pccl.InvalidArgument, match=variable):
            make("127.0.0.1:1")
    if variable not in ("PCCL_PORT", "PCCL_ADVERTISE"):  # nobody connects to a follower
        with pytest.raises(pccl.InvalidArgument, match=f"follow failed: {variable}"):
            pccl.follow("127.0.0.1:1")


@pytest.mark.parametrize("value", ["x:y:z", "127.0.0.1:99999", ",", ":"])
def test_a_wrong_master_is_named_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PCCL_MASTER", value)
    for make in (pccl.init, pccl.follow):
        with pytest.raises(pccl.InvalidArgument, match=r'PCCL_MASTER: ".*" is not "host:port"'):
            make()
    with pytest.raises(pccl.InvalidArgument, match=r'failed: ".*" is not "host:port"'):
        pccl.Communicator(value)


def test_an_advertised_address_is_checked_at_once() -> None:
    with pytest.raises(pccl.InvalidArgument, match=r'advertise: "a b" is not'):
        pccl.Communicator("127.0.0.1:1", advertise="a b")
    most = [f"host{index}" for index in range(32)]
    with pytest.raises(pccl.InvalidArgument, match="at most 31 addresses, not 32"):
        pccl.Communicator("127.0.0.1:1", advertise=most)
    pccl.Communicator("127.0.0.1:1", advertise=most[1:])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("5", 5.0), ("0.001", 0.001), ("2.5e1", 25.0), (".5", 0.5), ("1e8", 1e8), ("none", None)],
)
def test_the_default_timeout_has_one_rule(
    monkeypatch: pytest.MonkeyPatch, value: str, seconds: float | None
) -> None:
    monkeypatch.setenv("PCCL_TIMEOUT", value)
    assert _settings.seconds(None, "f") == seconds
    pccl.Communicator("127.0.0.1:1")


@pytest.mark.parametrize("value", ["0", "inf", "nan", " 5 ", "+5", "1_0", "-1", "1e9", "x", "0x5"])
def test_the_python_layers_refuse_the_timeouts_that_the_engine_refuses(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PCCL_TIMEOUT", value)
    for call in (lambda: _settings.seconds(None, "f"), lambda: pccl.Communicator("127.0.0.1:1")):
        with pytest.raises(pccl.InvalidArgument, match='PCCL_TIMEOUT=".*" is not seconds between'):
            call()


def test_a_timeout_may_be_longer_than_the_engine_counts_attempts() -> None:
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pccl.init(master.address, timeout=1e10):
            assert pccl.world_size() == 1


@pytest.mark.parametrize("value", [10**400, 10**5000, "x", -1, float("nan")], ids=range(5))
def test_a_timeout_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(pccl.InvalidArgument, match=r"seconds in 0..1.8e308 or infinite, not ."):
        pccl.init("127.0.0.1:1", timeout=value)
    with pccl.MasterNode("127.0.0.1:0") as master:
        with pytest.raises(pccl.InvalidArgument, match="wait failed: a timeout is seconds"):
            master.wait(value)


def test_an_integer_that_python_does_not_write_is_refused() -> None:
    with pytest.raises(pccl.InvalidArgument, match="port must be .* type int that is too long"):
        pccl.Communicator("127.0.0.1:1", port=10**5000)


@pytest.mark.parametrize("variable", ["PCCL_MIN_PEERS", "PCCL_PORT", "PCCL_DRAIN_SECONDS"])
@pytest.mark.parametrize("value", ["1_0", " 0 ", "+5", "\u0665"])
def test_numbers_in_variables_have_digits_only(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(pccl.InvalidArgument, match=variable):
        pccl.init("127.0.0.1:1")


@pytest.mark.parametrize(
    "options",
    [
        {"address": "\ud800:1"},
        {"replica_id": "\ud800", "ranks_per_replica": 1},
        {"name": "\ud800"},
        {"advertise": "\ud800"},
        {"advertise": ["a", "\ud800"]},
        {"secret": "\ud800"},
    ],
)
def test_text_that_utf8_does_not_have_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pccl.InvalidArgument) as refused:
        pccl.Communicator(**{"address": "127.0.0.1:1", **options})
    assert "\ud800" not in str(refused.value)  # which could not be printed


def test_an_address_that_utf8_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (pccl.init, pccl.follow, pccl.MasterNode):
        with pytest.raises(pccl.InvalidArgument, match="'host:port', not"):
            make("\ud800:1")
    monkeypatch.setenv("PCCL_MASTER", "\udcff:1")
    for make in (pccl.init, pccl.follow):
        with pytest.raises(pccl.InvalidArgument, match="PCCL_MASTER: a master is 'host:port', not"):
            make()


def _refused(run: Run, **env: str) -> str:
    """Why a peer with these settings may not join."""
    failed = run.peer(several_masters.join_and_fail, **env).expect("failed")
    assert failed["kind"] == "Refused", failed
    return str(failed["text"])


def test_a_peer_whose_heartbeats_do_not_go_with_the_masters_is_refused(run: Run) -> None:
    text = _refused(run, PCCL_HEARTBEAT_INTERVAL="5.5", PCCL_HEARTBEAT_TIMEOUT="60")
    assert "this peer gives a sign of life every 5.5 s" in text
    assert "silence of 6 s means death to the master" in text
    text = _refused(run, PCCL_HEARTBEAT_INTERVAL="0.1", PCCL_HEARTBEAT_TIMEOUT="1.15")
    assert "the master gives a sign of life every 1 s" in text
    assert "silence of 1.15 s means death to this peer" in text


def test_a_peer_whose_heartbeats_do_not_go_with_a_members_is_refused(run: Run) -> None:
    (member,) = run.peers(
        1, several_masters.leave_when_told, PCCL_HEARTBEAT_INTERVAL="3", PCCL_NAME="slow"
    )
    member.expect("in")
    text = _refused(run, PCCL_HEARTBEAT_INTERVAL="1", PCCL_HEARTBEAT_TIMEOUT="3.5")
    assert "peer slow gives a sign of life every 3 s" in text
    member.tell("leave")
    member.expect("leaves")
    assert member.ends() == 0
