"""`monitored_barrier`: a barrier that names the ranks that did not reach it."""

from __future__ import annotations

from contextlib import suppress

from pccl import _settings
from pccl.adapters.torch.errors import as_torch_error
from pccl.adapters.torch.rendezvous import Member
from pccl.errors import PCCLError, PeerLost, Result, Timeout

_FUNC = "monitored_barrier"


def monitored_barrier(
    member: Member, rank: int, number: int, timeout: float, wait_all_ranks: bool
) -> None:
    """Waits through the store until all ranks are in their call of this number.

    Raises:
        Timeout: Ranks have not come in time: on rank 0 with their numbers. Also a DistBackendError.
        PeerLost: The same, since they are gone.
    """
    here = f"monitored-{number}"
    deadline = _settings.Deadline(timeout)
    if rank == 0:
        _watch(member, here, deadline, timeout, wait_all_ranks)
    else:
        _report(member, here, deadline, rank)


def _watch(
    member: Member, here: str, deadline: _settings.Deadline, timeout: float, wait_all_ranks: bool
) -> None:
    others = range(1, member.size)
    missing = list(others)
    gone: list[int] = []
    never: list[int] = []  # of the missing ones: those that will not come

    def all_here_or_lost() -> bool:
        nonlocal missing, gone, never
        gave_up = [rank for rank in others if member.said(f"{here}-gave-up", rank)]
        missing = [r for r in others if r in gave_up or not member.said(here, r)]
        lost = set(member.gone())
        gone = [rank for rank in missing if rank in lost]
        never = [rank for rank in missing if rank in lost or rank in gave_up]
        return len(missing) == len(never) if wait_all_ranks else not missing or bool(never)

    with suppress(Timeout):
        member.poll(all_here_or_lost, deadline)
    if not missing:
        member.say(f"{here}-passed")
        return
    member.say(f"{here}-failed")
    named = missing if wait_all_ranks else (never or missing)[:1]
    ranks = ("Ranks " if len(named) > 1 else "Rank ") + ", ".join(map(str, named))
    sentence = f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {timeout * 1000:.0f} ms"
    error: PCCLError = Timeout.because(_FUNC, sentence)
    if gone:
        error = PeerLost(Result.RANK_CONNECTION_LOST, _FUNC, sentence)
    raise as_torch_error(error)


def _report(member: Member, here: str, deadline: _settings.Deadline, rank: int) -> None:
    member.say(here)
    passed = False

    def is_over() -> bool:
        nonlocal passed
        # First: before it left, rank 0 may have said how it ended.
        is_gone = 0 in member.gone()
        passed = member.said(f"{here}-passed", 0)
        return passed or member.said(f"{here}-failed", 0) or is_gone

    with suppress(Timeout):
        member.poll(is_over, deadline)
    if not passed:
        member.say(f"{here}-gave-up")
        sentence = (
            f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors "
            "while waiting for rank 0; rank 0's error names the faulty rank"
        )
        raise as_torch_error(Timeout.because(_FUNC, sentence))
