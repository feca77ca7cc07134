"""Weighted means among members of which one is lost."""

from __future__ import annotations

import numpy as np

import pccl
from programs.peer import hear, peer_id, say, start, value, x


def start_three() -> None:
    """Has three weighted means in flight; when told "die", two, and waits to be killed."""
    start()
    others = {peer: value(peer) % 97 + 1 for peer in pccl.membership().peers}
    say(event="in")
    if hear() == "die":
        pccl.allreduce_async(x(100_000, np.float64), "avg", weight=others[peer_id()], tag=1)
        pccl.allreduce_async(x(100_000, np.float64), "avg", weight=others[peer_id()], tag=2)
        say(event="started")
        hear()
    works = [
        pccl.allreduce_async(x(100_000, np.float64), "avg", weight=others[peer_id()], tag=tag)
        for tag in (1, 2, 3)
    ]
    say(event="waiting")
    ok, sizes, digest = True, [], []
    for work in works:
        result = work.wait()
        peers = work.info.contributors
        want = sum(value(p) * others[p] for p in peers) / sum(others[p] for p in peers)
        ok = (
            ok and bool(np.allclose(result, want, rtol=1e-12)) and bool((result == result[0]).all())
        )
        sizes.append(len(peers))
        digest.append(result[0].hex())
    say(event="done", ok=ok, sizes=sizes, digest=digest)
    hear()
