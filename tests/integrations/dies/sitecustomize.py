"""Python imports this at its start, where the folder is in PYTHONPATH.

The second rank of `pccl run` is killed in its reduction number DIES_AT. The file at DIES_ONCE
remembers that it was. With WAITS_AT=n all ranks, also those of torchrun, wait at their admission
point number n until the lost one is back.
"""

from __future__ import annotations

import os
import signal
from typing import Any

rank = os.environ.get("LOCAL_RANK", os.environ.get("PCCL_LOCAL_RANK"))
if "DIES_AT" in os.environ and rank == "1" and not os.path.exists(os.environ["DIES_ONCE"]):
    import pccl

    reduce, left = pccl.allreduce, int(os.environ["DIES_AT"])

    def reduce_or_die(*args: Any, **keywords: Any) -> Any:
        global left
        left -= 1
        if not left:
            open(os.environ["DIES_ONCE"], "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(*args, **keywords)

    pccl.allreduce = reduce_or_die  # type: ignore[assignment]

if "WAITS_AT" in os.environ and rank is not None:
    import threading

    import pccl

    admit, points, pause = pccl.admit, int(os.environ["WAITS_AT"]), threading.Event()

    def admit_the_lost_one() -> bool:
        global points
        points -= 1
        grown = admit()
        while points == 0 and pccl.world_size() == 1:
            pause.wait(0.02)
            grown = admit() or grown
        return grown

    pccl.admit = admit_the_lost_one  # type: ignore[assignment]
