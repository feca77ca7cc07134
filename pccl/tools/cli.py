"""The `pccl` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from pccl import __version__
from pccl.errors import PCCLError
from pccl.master import DEFAULT_LISTEN, make_secret, serve, serve_with_secret
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
    raw = argparse.RawDescriptionHelpFormatter

    words = (
        "Runs a master and prints the line to join with. All connections of the run are encrypted "
        "with its secret: that of --secret-file, PCCL_SECRET or PCCL_SECRET_FILE, else a new one."
    )
    _add_master_options(commands.add_parser("master", help="run a master", description=words))

    words = "Prints a new secret for PCCL_SECRET, or for a file that PCCL_SECRET_FILE names."
    commands.add_parser("secret", help="make a secret", description=words)

    _add_run_options(
        commands.add_parser(
            "run",
            help="run a program as several peers on this machine",
            description="Runs a program as several peers on this machine, with a master of their own.",
            usage="pccl run [-h] -n N [--elastic] [--show-join] -- COMMAND [ARG ...]",
            epilog=_RUN_EPILOG,
            formatter_class=raw,
        )
    )

    words = (
        "Tells on one screen whether this machine can join a run at that master. PCCL_PORT, "
        "PCCL_BIND and PCCL_ADVERTISE count as they do for a peer."
    )
    brief = "tell whether this machine can join a run"
    doctor.add_arguments(commands.add_parser("doctor", help=brief, description=words))

    words = "Measures all-reduce between the peers that run this, and each pair of them."
    brief = "measure all-reduce between the peers that run this"
    bench.add_arguments(
        commands.add_parser(
            "bench", help=brief, description=words, epilog=bench.EPILOG, formatter_class=raw
        )
    )
    return parser


def _add_master_options(parser: argparse.ArgumentParser) -> None:
    words = "where to listen; port 0 takes a free one (default: %(default)s)"
    parser.add_argument("--listen", default=DEFAULT_LISTEN, metavar="HOST:PORT", help=words)
    words = "evict members that most others have waited for this long in one call (default: never)"
    parser.add_argument("--straggler-timeout", metavar="SECONDS", help=words)
    words = "start a group when N peers are there, whatever they ask for (default: %(default)s)"
    parser.add_argument("--min-peers", type=int, default=1, metavar="N", help=words)
    words = "relay nothing between peers that cannot connect to each other (as PCCL_RELAY=0)"
    parser.add_argument("--no-relay", action="store_true", help=words)
    secret = parser.add_mutually_exclusive_group()
    words = "a file with the secret; made, with a new one, when it is not there"
    secret.add_argument("--secret-file", metavar="PATH", help=words)
    words = "no secret: whoever reaches the master may join, and nothing is encrypted"
    secret.add_argument("--insecure", action="store_true", help=words)


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    words = "number of ranks"
    parser.add_argument("-n", "--nproc", type=int, required=True, metavar="N", help=words)
    words = "go on without ranks that fail, while at least one lives"
    parser.add_argument("--elastic", action="store_true", help=words)
    words = (
        "print the whole line to join with from another terminal of this machine, the secret too"
    )
    parser.add_argument("--show-join", action="store_true", help=words)
    rest, words = argparse.REMAINDER, "e.g. python train.py"
    parser.add_argument("program", nargs=rest, metavar="COMMAND", help=words)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; default: the process's.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    program: list[str] = []
    # argparse's own reading of -- differs between versions.
    if given[:1] == ["run"] and "--" in given:
        at = given.index("--")
        given, program = given[:at], given[at + 1 :]
    parser = _parser()
    options = parser.parse_args(given)
    if options.command == "master":
        return _master(parser, options)
    if options.command == "doctor":
        return doctor.run(options)
    if options.command == "secret":
        print(make_secret())
        return 0
    if options.command == "bench":
        return bench.run(options)
    command = [*options.program, *program]
    if options.nproc < 1:
        parser.error("-n must be at least 1")
    if not command:
        parser.error("no program to run; e.g. pccl run -n 4 -- python train.py")
    try:
        elastic, show_join = options.elastic, options.show_join
        return launch(command, options.nproc, elastic=elastic, show_join=show_join)
    except PCCLError as error:
        print(f"pccl run: {error.reason or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _master(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.min_peers < 1:
        parser.error("--min-peers must be at least 1")
    more: Any = {
        "straggler_timeout": options.straggler_timeout,
        "relay": False if options.no_relay else None,
        "min_peers": options.min_peers,
    }
    if not options.insecure:
        return serve_with_secret(options.listen, secret_file=options.secret_file, **more)
    for variable in ("PCCL_SECRET", "PCCL_SECRET_FILE"):
        if variable in os.environ:
            parser.error(f"--insecure, but {variable} is set")
    return serve(options.listen, **more)
