"""A master as a program of its own: what `pccl master` and `pccl_master` run."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from pccl._settings import DEFAULT_PORT
from pccl.communicator import MasterNode
from pccl.errors import PCCLError

__all__ = ["main", "serve"]

DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"


def serve(listen: str, *, straggler_timeout: str | None = None) -> int:
    """Prints `listening on HOST:PORT` and serves until SIGINT or SIGTERM.

    Args:
        listen: "host:port" to listen on.
        straggler_timeout: Seconds, instead of PCCL_STRAGGLER_TIMEOUT.

    Returns:
        The exit status: 0, or 1 when it could not listen.
    """
    if straggler_timeout is not None:
        os.environ["PCCL_STRAGGLER_TIMEOUT"] = straggler_timeout
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with MasterNode(listen) as master:
            print(f"listening on {master.address}", flush=True)
            master.wait()
    except KeyboardInterrupt:
        pass
    except PCCLError as error:
        print(f"pccl master: {error.reason or error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The `pccl_master` command."""
    parser = argparse.ArgumentParser(prog="pccl_master", description="Runs a pccl master.")
    parser.add_argument(
        "--listen-address",
        default=DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where to listen (default: %(default)s)",
    )
    return serve(parser.parse_args(argv).listen_address)


if __name__ == "__main__":
    sys.exit(main())
