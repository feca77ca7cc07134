"""The `pccl` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pccl import __version__, master
from pccl.errors import PCCLError
from pccl.tools import bench, doctor
from pccl.tools.run import launch

__all__ = ["main"]

_RUN_EPILOG = """\
Every rank gets PCCL_MASTER, PCCL_SECRET (a new one), PCCL_MIN_PEERS, PCCL_BIND=127.0.0.1 and
PCCL_LOCAL_RANK, so `pccl.init()` needs no arguments. Output lines are prefixed by that number: [2] text.

When a rank fails the others are stopped and its exit status is returned (128 + n for signal n).
With --elastic the others go on without it, and the status is 0 if at least one rank succeeds.

Ctrl-C interrupts all ranks; those that do not end are terminated, then killed. Status 130.

On several machines: run `pccl master` on one, and what it prints on each.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pccl", description="All-reduce between machines that join and leave."
    )
    parser.add_argument("--version", action="version", version=f"pccl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "master",
        help="run a master",
        description="Runs a master and prints the line to join with. All connections of the run are "
        "encrypted with its secret: that of --secret-file, PCCL_SECRET or PCCL_SECRET_FILE, else a new one.",
    )
    serve.add_argument(
        "--listen",
        default=master.DEFAULT_LISTEN,
        metavar="HOST:PORT",
        help="where to listen; port 0 takes a free one (default: %(default)s)",
    )
    serve.add_argument(
        "--straggler-timeout",
        metavar="SECONDS",
        help="evict members that most others have waited for this long in one call (default: never)",
    )
    serve.add_argument(
        "--min-peers",
        type=int,
        default=1,
        metavar="N",
        help="start a group when N peers are there, whatever they ask for (default: %(default)s)",
    )
    serve.add_argument(
        "--no-relay",
        action="store_true",
        help="relay nothing between peers that cannot connect to each other (as PCCL_RELAY=0)",
    )
    whose = serve.add_mutually_exclusive_group()
    whose.add_argument(
        "--secret-file",
        metavar="PATH",
        help="a file with the secret; made, with a new one, when it is not there",
    )
    whose.add_argument(
        "--insecure",
        action="store_true",
        help="no secret: whoever reaches the master may join, and nothing is encrypted",
    )

    commands.add_parser(
        "secret",
        help="make a secret",
        description="Prints a new secret for PCCL_SECRET, or for a file that PCCL_SECRET_FILE names.",
    )

    run = commands.add_parser(
        "run",
        help="run a program as several peers on this machine",
        description="Runs a program as several peers on this machine, with a master of their own.",
        usage="pccl run [-h] -n N [--elastic] [--show-join] -- COMMAND [ARG ...]",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-n", "--nproc", type=int, required=True, metavar="N", help="number of ranks")
    run.add_argument(
        "--elastic",
        action="store_true",
        help="go on without ranks that fail, while at least one lives",
    )
    run.add_argument(
        "--show-join",
        action="store_true",
        help="print the whole line to join with from another terminal of this machine, the secret too",
    )
    run.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="COMMAND", help="e.g. python train.py"
    )

    examine = commands.add_parser(
        "doctor",
        help="tell whether this machine can join a run",
        description="Tells on one screen whether this machine can join a run at that master. "
        "PCCL_PORT, PCCL_BIND and PCCL_ADVERTISE count as they do for a peer.",
    )
    doctor.add_arguments(examine)

    measure = commands.add_parser(
        "bench",
        help="measure all-reduce between the peers that run this",
        description="Measures all-reduce between the peers that run this, and each pair of them.",
        epilog=bench.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(measure)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; default: the process's.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    program: list[str] = []
    if (
        given[:1] == ["run"] and "--" in given
    ):  # argparse's own reading of -- differs between versions
        at = given.index("--")
        given, program = given[:at], given[at + 1 :]
    parser = _parser()
    options = parser.parse_args(given)
    if options.command == "master":
        if options.min_peers < 1:
            parser.error("--min-peers must be at least 1")
        if not options.insecure:
            return master.serve_with_secret(
                options.listen,
                secret_file=options.secret_file,
                straggler_timeout=options.straggler_timeout,
                relay=False if options.no_relay else None,
                min_peers=options.min_peers,
            )
        for variable in ("PCCL_SECRET", "PCCL_SECRET_FILE"):
            if variable in os.environ:
                parser.error(f"--insecure, but {variable} is set")
        return master.serve(
            options.listen,
            straggler_timeout=options.straggler_timeout,
            relay=False if options.no_relay else None,
            min_peers=options.min_peers,
        )
    if options.command == "doctor":
        return doctor.run(options)
    if options.command == "secret":
        print(master.make_secret())
        return 0
    if options.command == "bench":
        return bench.run(options)
    command = [*options.program, *program]
    if options.nproc < 1:
        parser.error("-n must be at least 1")
    if not command:
        parser.error("no program to run; e.g. pccl run -n 4 -- python train.py")
    try:
        return launch(command, options.nproc, elastic=options.elastic, show_join=options.show_join)
    except PCCLError as error:
        print(f"pccl run: {error.reason or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
