"""Python imports this at its start, where the folder is in PYTHONPATH.

The second rank of `pccl run` is killed in its reduction number DIES_AT. The file at DIES_ONCE
remembers that it was.
"""

from __future__ import annotations

import os
import signal
from typing import Any

if os.environ.get("PCCL_LOCAL_RANK") == "1" and not os.path.exists(os.environ["DIES_ONCE"]):
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
