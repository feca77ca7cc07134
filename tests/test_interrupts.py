"""Ctrl-C in a call that blocks: nothing of the call goes on without the caller."""

from __future__ import annotations

import pytest
from workers import running

# Makes one call again and again, interrupted at its first line of Python, its second, and so on, up
# to the line at which it blocks: the other member makes no call. There its timeout ends it.
SWEEP = """
import linecache

HERE = os.path.dirname(pccl.__file__)
strided = np.arange(200.0, dtype=np.float32)[::2]
calls = {
    "strided": lambda **how: pccl.allreduce([strided], **how),
    "in place": lambda **how: pccl.allreduce([strided], out=[strided], **how),
    "weighted": lambda **how: pccl.allreduce(np.ones(100, np.float32), "avg", weight=2, **how),
    "quantized": lambda **how: pccl.allreduce(
        np.ones(100, np.float32), quantize=pccl.Quantize("int8", error_feedback=True), **how
    ),
    "number": lambda **how: pccl.allreduce(3, **how),
    "broadcast": lambda **how: pccl.broadcast(np.ones(3), **how),
    "allgather": lambda **how: pccl.allgather(np.ones(3), **how),
    "reduce_scatter": lambda **how: pccl.reduce_scatter(np.ones(4), **how),
    "level 1": lambda **how: comm.all_reduce(
        strided, np.zeros(100, np.float32), op="sum", **how
    ),
}

class Interrupts:
    # Raises at the line of that number, counted in pccl's own files.
    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # At its end a `with` is a line again, where no signal is handled and no lock let go.
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

comm = pccl.init()
say(event="in", rank=pccl.rank())
name = hear()
at = 0
while name is not None:
    at += 1
    try:
        sys.settrace(Interrupts(at))
        calls[name](tag=at, timeout=0.3)
        how = "done"
    except KeyboardInterrupt:
        how = "interrupted"
    except pccl.Timeout:
        how = "timeout"
    finally:
        sys.settrace(None)
    unfinished = comm._engine.unfinished()
    if how != "interrupted" or unfinished:
        say(event=how, unfinished=unfinished, lines=at)
        name, at = hear(), 0
hear()
"""
CALLS = [
    "strided",
    "in place",
    "weighted",
    "quantized",
    "number",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "level 1",
]


@pytest.mark.timeout(300)
def test_nothing_is_in_flight_after_a_ctrl_c_at_any_line_of_a_call() -> None:
    with running() as run:
        first, second = run.peers(2, SWEEP)
        for peer in (first, second):
            peer.expect("in", 60)
        for name in CALLS:
            first.tell(name)
            answer = first.next(60)
            assert (answer["event"], answer["unfinished"]) == ("timeout", 0), (name, answer)
            assert answer["lines"] > 10, name  # else it blocked before it began
        for peer in (first, second):
            peer.tell(None)
            peer.tell(None)
            peer.ends()
