"""Exceptions: what they say, carry and survive."""

import copy
import pickle

import pytest

import pccl
from pccl import errors

CLASSES = [getattr(errors, name) for name in errors.__all__ if name != "Result"]


def make(cls, **extra):
    error = cls(pccl.Result.RANK_CONNECTION_LOST, "allreduce", "it broke", peer="ab" * 16)
    for name, value in extra.items():
        setattr(error, name, value)
    return error


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_says_what_failed_and_how(cls):
    text = str(make(cls))
    assert text.startswith("allreduce failed: ")
    assert "it broke" in text
    assert "abababab" not in text  # the reason names the peer


@pytest.mark.parametrize("cls", CLASSES)
def test_the_result_code_is_in_the_sentence_of_explicit_calls_only(cls):
    code = pccl.Result.RANK_CONNECTION_LOST
    text = str(cls(code, "all_reduce", "why"))
    assert text.startswith("all_reduce failed with RANK_CONNECTION_LOST: ")
    assert "why" in text
    assert code.name not in str(cls(code, "allreduce", "why"))
    assert code.name in str(cls(code, "allreduce"))  # else it would say nothing


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("copier", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_every_class_survives_pickling_and_copying(cls, copier):
    error = make(cls)
    again = copier(error)
    assert type(again) is cls
    assert str(again) == str(error)
    assert repr(again) == repr(error)
    assert (again.result, again.func_name, again.reason, again.peer) == (
        pccl.Result.RANK_CONNECTION_LOST,
        "allreduce",
        "it broke",
        "ab" * 16,
    )


def test_a_deadlock_tells_who_waits_in_what_also_after_pickling():
    error = errors.from_engine(7, 8, "sync", "stuck", "", "rank 0 in sync\nrank 1 in allreduce")
    assert isinstance(error, pccl.Deadlock)
    assert error.waiting == ("rank 0 in sync", "rank 1 in allreduce")
    again = pickle.loads(pickle.dumps(error))
    assert again.waiting == error.waiting
    assert "rank 1 in allreduce" in str(again)


def test_a_deadlock_names_each_waiting_member_once():
    reason = "the members wait in calls that cannot meet: rank 0 in sync; rank 1 in allreduce"
    error = errors.from_engine(7, 8, "sync", reason, "", "rank 0 in sync\nrank 1 in allreduce")
    assert error.reason == reason
    sentence = "sync failed: the members wait in calls that cannot meet"
    assert str(error).splitlines() == [sentence, "  rank 0 in sync", "  rank 1 in allreduce"]


def test_an_eviction_says_who_is_out():
    error = errors.from_engine(15, 8, "allreduce", "not heard for 6 s", "", "")
    assert error.reason == "not heard for 6 s"
    assert str(error) == "allreduce failed: this peer is out of the run: not heard for 6 s"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_advises_one_of_four_things(cls):
    assert cls.advice in ("retry", "rejoin", "fix", "stop")


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (pccl.InvalidArgument, ValueError),
        (pccl.InvalidUsage, RuntimeError),
        (pccl.NotInitialized, pccl.InvalidUsage),
        (pccl.PendingOperations, pccl.InvalidUsage),
        (pccl.NotSupported, NotImplementedError),
        (pccl.Timeout, TimeoutError),
        (pccl.AuthenticationFailed, pccl.Refused),
        (pccl.RevisionMismatch, pccl.Evicted),
    ],
)
def test_classes_are_also_what_python_programs_expect(cls, base):
    assert issubclass(cls, base)
    assert issubclass(cls, pccl.PCCLError)


@pytest.mark.parametrize(
    ("cause", "cls"),
    list(
        enumerate(
            [
                pccl.InvalidArgument,
                pccl.InvalidUsage,
                pccl.NotInitialized,
                pccl.PendingOperations,
                pccl.NotSupported,
                pccl.MismatchedCall,
                pccl.Deadlock,
                pccl.TooFewPeers,
                pccl.PeerLost,
                pccl.Unreachable,
                pccl.Timeout,
                pccl.MasterLost,
                pccl.Refused,
                pccl.AuthenticationFailed,
                pccl.Evicted,
                pccl.RevisionMismatch,
                pccl.StateUnavailable,
                pccl.InternalError,
            ],
            start=1,
        )
    ),
)
def test_every_cause_of_the_engine_has_its_class(cause, cls):
    error = errors.from_engine(cause, 11, "admit", "why", "cd" * 16, "")
    assert type(error) is cls
    assert error.result is pccl.Result.UPDATE_TOPOLOGY_FAILED
    assert error.peer == "cd" * 16
    assert errors.from_engine(cause, 11, "admit", "why", "", "").peer is None


def test_an_interruption_is_ctrl_c_and_an_unknown_cause_is_our_bug():
    assert type(errors.from_engine(19, 8, "allreduce", "", "", "")) is KeyboardInterrupt
    assert type(errors.from_engine(99, 8, "allreduce", "", "", "")) is pccl.InternalError


def test_check_raises_for_everything_but_success():
    pccl.PCCLError.check(0, "connect")
    with pytest.raises(pccl.PCCLError, match="TOO_FEW_PEERS") as caught:
        pccl.PCCLError.check(5, "all_reduce")
    assert caught.value.result is pccl.Result.TOO_FEW_PEERS
