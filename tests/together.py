"""Scripts that run together to their end."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from forked import Forked
from workers import complaints, eventually


def run_together(
    folder: Path, *programs: list[str], kind: str = "torch", seconds: float = 120, **env: str
) -> list[str]:
    """Runs these programs together, each in a process that is forked (forked.py).

    A program is a script with its arguments. `kind`: of fork_server.PRELOADED. Returns what each of
    them printed.
    """
    with ExitStack() as stack:
        pairs = [[stack.enter_context(tempfile.TemporaryFile()) for _ in "oe"] for _ in programs]
        running = []
        for rank, (program, (output, errors)) in enumerate(zip(programs, pairs, strict=True)):
            one = Forked(
                program,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, "RANK": str(rank), **env},
                cwd=folder,
                kind=kind,
            )
            stack.callback(one.kill)
            running.append(one)

        def over() -> bool:
            statuses = [one.poll() for one in running]
            return None not in statuses or any(statuses)

        with suppress(AssertionError):  # what was printed says more
            eventually(over, seconds=seconds)
        shown, complained = [], ""
        for output, errors in pairs:
            output.seek(0)
            errors.seek(0)
            shown.append(output.read().decode())
            complained += complaints(errors.read().decode(), news=False)
        assert [one.poll() for one in running] == [0] * len(running), "".join(shown) + complained
        assert not complained, complained
        return shown
