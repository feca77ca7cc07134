"""Members that an operator looks at, and commands."""

from __future__ import annotations

import threading

import numpy as np

import pccl
from programs.peer import hear, say, start


def obey() -> None:
    """Says "in" as a member, and does what it is told, one word a line."""
    comm = start()
    pccl.barrier()
    say(event="in")
    while True:
        word = hear()
        try:
            if word.startswith("reduce"):
                pccl.allreduce(np.ones(5 if word == "reduce" else 7, np.float32))
                say(event="reduced", world=pccl.world_size())
            elif word == "leave":
                pccl.shutdown()
                say(event="left")
                return
            else:
                while word == "until draining" and not comm.draining:
                    threading.Event().wait(0.02)
                say(event="draining", draining=comm.draining)
        except pccl.PCCLError as error:
            say(event="failed", kind=type(error).__name__, text=str(error))
