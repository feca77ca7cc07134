"""Runs a program as torchrun or `pccl run` would: python run_example.py PROGRAM ARGUMENTS...

With DIES_AT=n and DIES_ONCE=path in the environment rank 1 is killed after its nth optimizer step.
The file at that path remembers that it was.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from pathlib import Path


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
    elif dies:
        die_in_the_middle()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
