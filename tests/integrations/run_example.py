"""Runs a program as torchrun or `pccl run` would: python run_example.py PROGRAM ARGUMENTS...

With DIES_AT=n and DIES_ONCE=path in the environment rank 1 is killed after its nth optimizer step;
a program of JAX is killed before its nth reduction, and a member that is alone then waits for it to
come back. The file at that path remembers that it was.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def die_in_the_middle() -> None:
    import os
    import signal

    from torch.optim.optimizer import register_optimizer_step_post_hook

    last, steps = int(os.environ["DIES_AT"]), 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == last and os.environ.get("RANK", os.environ.get("PCCL_LOCAL_RANK")) == "1":
            try:
                open(os.environ["DIES_ONCE"], "x").close()
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)


def die_in_a_reduction() -> None:
    import signal
    import threading

    import pccl

    reduce, admit, count, pause = pccl.allreduce, pccl.admit, 0, threading.Event()

    def reduce_or_die(*args: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == int(os.environ["DIES_AT"]) and pccl.rank() == 1:
            with suppress(FileExistsError):
                open(os.environ["DIES_ONCE"], "x").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return reduce(*args, **keywords)

    def admit_the_lost_one() -> bool:
        grown = admit()
        while pccl.world_size() == 1:
            pause.wait(0.02)
            grown = admit() or grown
        return grown

    pccl.allreduce = reduce_or_die  # type: ignore[assignment]
    pccl.admit = admit_the_lost_one  # type: ignore[assignment]


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # whole lines, as ranks share the stream
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = sys.argv[1:]
    dies = "DIES_AT" in os.environ
    if Path(sys.argv[0]).name.startswith("ray_"):
        import ray

        # Ray's workers are processes that it starts.
        setup = {"worker_process_setup_hook": die_in_the_middle} if dies else {}
        ray.init(
            num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", runtime_env=setup
        )
    elif dies and "flax" in sys.argv[0]:
        die_in_a_reduction()
    elif dies:
        die_in_the_middle()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
