"""The `pccl` command."""

from __future__ import annotations

import argparse
import errno
import io
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pccl
from pccl import __version__, _core
from pccl._settings import SECRET_VARIABLES
from pccl.errors import AuthenticationFailed, InvalidArgument, InvalidUsage, PCCLError
from pccl.master import DEFAULT_LISTEN, make_secret, serve, serve_with_secret
from pccl.tools import bench, doctor, orders, screen, show, trace, web
from pccl.tools import top as top_command
from pccl.tools.hosts import Host, launch_on, parse_hosts
from pccl.tools.parsing import (
    MISUSE,
    Example,
    Misuse,
    Parser,
    endpoint,
    endpoints,
    reason_of,
    seconds,
    whole,
)
from pccl.tools.run import MAX_RANKS, check_program, launch
from pccl.tools.status import ask_any, in_background

__all__ = ["main", "parser", "version_lines"]

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def version_lines() -> list[str]:
    """What `pccl --version` prints."""
    version, bundled = _core.openssl()
    return [
        f"pccl {__version__}",
        f"Python {platform.python_version()} ({sys.executable})",
        f"platform {platform.platform()}",
        f"package {Path(pccl.__file__).parent}",
        f"{version} ({'bundled' if bundled else 'of the system'})",
    ]


class _Version(argparse.Action):
    def __call__(self, *_: Any) -> None:
        print("\n".join(version_lines()))
        sys.exit(0)


def parser() -> Parser:
    """The command line: the parser of `pccl` with those of its subcommands."""
    top = Parser(
        prog="pccl",
        description="All-reduce between machines that join and leave.",
        form="COMMAND ...",
        examples=[
            Example("pccl run -n 4 -- python train.py", "four peers on this machine"),
            Example("pccl master --listen 0.0.0.0:48148", "a run of several machines"),
            Example("pccl doctor 192.0.2.7:48148", "can this machine join that run?"),
        ],
        then="`pccl COMMAND --help` shows the examples and the options of a command.",
    )
    top.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the versions of pccl and Python, the platform and the package's folder",
    )
    commands = top.add_subparsers(prog="pccl", dest="command", metavar="COMMAND", title="Commands")
    for add in (_add_run, _add_master, _add_status, _add_top, _add_doctor, _add_bench, _add_trace):
        add(commands.add_parser)
    for order in orders.ORDERS:
        orders.add(commands.add_parser, order)
    _add_secret(commands.add_parser)
    return top


def _add_run(add: Callable[..., Parser]) -> None:
    run = add(
        "run",
        help="run a program as several peers, on this machine or on others",
        description="Runs a program as several peers, here or on machines that ssh reaches. "
        "Their master runs here.",
        form="(-n N | --hosts HOSTS) [--elastic] [--restarts N] -- COMMAND [ARG ...]",
        examples=[
            Example("pccl run -n 4 -- python train.py", "four peers"),
            Example("pccl run -n 4 --elastic -- python train.py", "go on without ranks that fail"),
            Example(
                "pccl run -n 4 --elastic --restarts 3 -- python train.py",
                "start a rank that fails again, up to three times",
            ),
            Example("pccl run -n 2 -- pccl bench", "how fast all-reduce is on this machine"),
            Example(
                "pccl run -n 8 --join a:48148,b:48148 -- python train.py",
                "eight more peers of the run of these masters",
            ),
            Example(
                "pccl run --hosts alice:2,bob:4 -- python train.py",
                "two ranks on alice and four on bob, by ssh",
            ),
        ],
        notes="""\
Every rank gets PCCL_MASTER, PCCL_SECRET (a new one), PCCL_MIN_PEERS, PCCL_BIND=127.0.0.1 and
PCCL_LOCAL_RANK, so `pccl.init()` needs no arguments. Output lines begin with that number: [2] text.
OMP_NUM_THREADS is the number of cores divided by N, unless it is set already.

When a rank fails, the others are stopped, and its exit status is returned (128 + n for signal n).
With --elastic the others go on without it; the status is 0 if at least one rank succeeds. A rank
that fails before the run has started, which waits for all N, stops the others as well.
With --restarts a rank that fails is started again, after 1 s, 2 s, 4 s up to 30 s. It joins the
others as a newcomer does, and begins alone if there are none.

Ctrl-C interrupts all ranks. Those that do not end are terminated, then killed. The status is 130.
SIGTERM asks them to leave at their next admission points, within PCCL_DRAIN_SECONDS (25). The
status is 143.

With --join ranks take part in a run that others have begun, or begin it where the masters are. The
secret and other settings come from this process's environment. PCCL_MIN_PEERS is not set.

With --hosts, ssh must reach every host without a question, and pccl of the same version must be
installed there, in the environment of --python. Ranks start in the folder of the same name, if there
is one. They get this process's settings of pccl, what --env names, and nothing else of its
environment. The secret goes through the standard input of ssh. If this process ends in whatever way,
the ranks are asked to leave, and ended. A host that ssh cannot reach counts as
a rank that failed, with status 255.
""",
        then="without ssh run `pccl master` on one machine, and the line that it prints on each.",
    )
    words, number = (
        "number of ranks on this machine (default: --hosts has them)",
        whole(1, MAX_RANKS),
    )
    run.add_argument("-n", "--nproc", type=number, metavar="N", help=words)
    words = (
        "run on these machines instead: names for ssh, each with its number of ranks, as in "
        "a:4,b:4 (default: this machine)"
    )
    run.add_argument("--hosts", type=_hosts, metavar="HOSTS", help=words)
    words = (
        "the master's address as the hosts reach this machine; port 0 takes a free one (default: "
        "this machine's address towards the first host, port 0)"
    )
    run.add_argument("--address", type=endpoint, metavar="HOST:PORT", help=words)
    words = "the command that reaches a host, with options (default: %(default)s)"
    run.add_argument("--ssh", default="ssh", metavar="COMMAND", help=words)
    words = "the interpreter on the hosts (default: the path of the one here)"
    run.add_argument("--python", default=sys.executable, metavar="PATH", help=words)
    words = "pass this variable on to the hosts; may be given several times (default: none)"
    run.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help=words)
    words = "go on without ranks that fail, while at least one lives (default: stop all)"
    run.add_argument("--elastic", action="store_true", help=words)
    words = "start each rank that fails again, up to N times (default: %(default)s)"
    run.add_argument("--restarts", type=whole(0, 2**31 - 1), default=0, metavar="N", help=words)
    words = (
        "print the whole line to join with from another terminal of this machine, with the secret "
        "(default: without it)"
    )
    run.add_argument("--show-join", action="store_true", help=words)
    words = "join the run of the masters at these addresses (default: begin a run)"
    run.add_argument("--join", type=endpoints, metavar="HOST:PORT[,...]", help=words)
    rest, words = argparse.REMAINDER, "the program and its arguments"
    run.add_argument("unmarked", nargs=rest, metavar="COMMAND", help=words)


def _add_master(add: Callable[..., Parser]) -> None:
    master = add(
        "master",
        help="run a master",
        description="Runs a master until Ctrl-C, and prints the line to join with.",
        examples=[
            Example("pccl master", "on all interfaces, with a new secret"),
            Example(
                "pccl master --secret-file run.secret --min-peers 8",
                "with a secret that stays, for a run that begins with eight peers",
            ),
            Example("pccl master --http 48149", "with a status page on 127.0.0.1:48149"),
        ],
        notes="""\
All connections of the run are encrypted with its secret: the one in --secret-file, PCCL_SECRET or
PCCL_SECRET_FILE, else a new one.

The status page is not encrypted. With a secret it wants a token derived from it, as the end of the
address (?token=...) or as `Authorization: Bearer ...`. The token is printed with --show-token, or
by `pccl secret --token`. /status.json and /metrics are views of the same status.
""",
        then="run the printed line on each machine; `pccl doctor` tells whether one can join.",
    )
    words = "where to listen; port 0 takes a free one (default: %(default)s)"
    master.add_argument(
        "--listen", type=endpoint, default=DEFAULT_LISTEN, metavar="HOST:PORT", help=words
    )
    words = (
        "evict members that most others have waited for this long in one call; `none`: never "
        "(default: PCCL_STRAGGLER_TIMEOUT, else 1800)"
    )
    master.add_argument(
        "--straggler-timeout", type=_straggler_timeout, metavar="SECONDS", help=words
    )
    words = "start a group when N peers are there, whatever they ask for (default: %(default)s)"
    number = whole(1, 2**31 - 1)
    master.add_argument("--min-peers", type=number, default=1, metavar="N", help=words)
    words = (
        "the addresses of all masters of the run, this one included, the preferred one first; "
        "give all masters the same list and the same secret (default: this master is the only one)"
    )
    master.add_argument("--peers", type=endpoints, metavar="HOST:PORT,...", help=words)
    words = (
        "this master's place in --peers, from 1 (default: the address that --listen and the "
        "machine's own addresses tell)"
    )
    master.add_argument("--place", type=whole(1, 16), metavar="N", help=words)
    words = (
        "relay nothing between peers that cannot connect to each other, as PCCL_RELAY=0 "
        "(default: relay)"
    )
    master.add_argument("--no-relay", action="store_true", help=words)
    words = (
        "serve a status page, /status.json and /metrics there; a bare port means 127.0.0.1, and "
        "port 0 takes a free one (default: no page)"
    )
    master.add_argument("--http", type=_http, metavar="HOST:PORT", help=words)
    words = "print the address of the status page with its token (default: without it)"
    master.add_argument("--show-token", action="store_true", help=words)
    secret = master.add_mutually_exclusive_group()
    words = (
        "a file with the secret; if it is missing, it is made with a new one (default: "
        "PCCL_SECRET or PCCL_SECRET_FILE, else a new secret is printed; with --peers: an error)"
    )
    secret.add_argument("--secret-file", metavar="PATH", help=words)
    words = (
        "no secret: whoever reaches the master may join, and nothing is encrypted "
        "(default: a secret)"
    )
    secret.add_argument("--insecure", action="store_true", help=words)


def _add_status(add: Callable[..., Parser]) -> None:
    show.add_arguments(
        add(
            "status",
            help="show a run on one screen",
            description="Shows what a run does: its members, who waits for whom, and what is wrong.",
            examples=[
                Example("pccl status 192.0.2.7:48148", "the run of that master"),
                Example("pccl status --json", "for programs; the master that PCCL_MASTER names"),
            ],
            notes=(
                "The exit status is 0 if all is well, 1 if there is something to look at (the last "
                "lines say what), and 2 if no master answered."
            ),
            then="`pccl top` shows the same live; `pccl master --http` serves it as a page.",
        )
    )


def _add_top(add: Callable[..., Parser]) -> None:
    top_command.add_arguments(
        add(
            "top",
            help="show a run live",
            description="Shows a run live on a terminal. Members that others wait for are red.",
            examples=[
                Example("pccl top 192.0.2.7:48148", "once a second"),
                Example("pccl top --interval 5", "less often; the master that PCCL_MASTER names"),
            ],
            notes="While the master does not answer, the last picture stays, and it is asked again.",
            then="press ? for the keys and q to end.",
        )
    )


def _add_doctor(add: Callable[..., Parser]) -> None:
    doctor.add_arguments(
        add(
            "doctor",
            help="tell whether this machine can join a run",
            description="Tells on one screen whether this machine can join a run at a master.",
            examples=[
                Example("pccl doctor 192.0.2.7:48148", "ask that master"),
                Example("PCCL_SECRET=... pccl doctor", "the master that PCCL_MASTER names"),
            ],
            notes="PCCL_PORT, PCCL_BIND and PCCL_ADVERTISE count as they do for a peer. Schedulers, "
            "containers, notebooks and clouds are recognised by files and variables, without the "
            "network.",
            then="if it says that this machine can join, start the program here.",
        )
    )


def _add_bench(add: Callable[..., Parser]) -> None:
    bench.add_arguments(
        add(
            "bench",
            help="measure all-reduce between the peers that run this",
            description="Measures all-reduce between the peers that run this, and each pair of them.",
            examples=[
                Example("pccl run -n 2 -- pccl bench", "this machine alone"),
                Example(
                    "PCCL_SECRET=... pccl bench --master that-host:48148 --peers 3",
                    "on each of three machines, after `pccl master` on one of them",
                ),
            ],
            notes=bench.NOTES,
            then="compare the figures with those of docs/benchmarks.md.",
        )
    )


def _add_secret(add: Callable[..., Parser]) -> None:
    secret = add(
        "secret",
        help="make a secret, or print the status page's token",
        description="Prints a new secret for PCCL_SECRET, or for a file that PCCL_SECRET_FILE names.",
        examples=[
            Example("export PCCL_SECRET=$(pccl secret)", "for the programs that this shell starts"),
            Example("(umask 077; pccl secret > run.secret)", "in a file that only you can read"),
            Example("PCCL_SECRET_FILE=run.secret pccl secret --token", "to read the status page"),
        ],
        then="start `pccl master` with it, and the peers with the same.",
    )
    words = (
        "print the token that the status page of `pccl master --http` wants, derived from the "
        "secret in PCCL_SECRET or PCCL_SECRET_FILE (default: a new secret)"
    )
    secret.add_argument("--token", action="store_true", help=words)


def _http(text: str) -> str:
    """Checks what `pccl master --http` takes."""
    try:
        web.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _add_trace(add: Callable[..., Parser]) -> None:
    command = add(
        "trace",
        help="put the traces of a run's peers together, and see who made whom wait",
        description="Puts the traces of a run's peers on one clock, and says who made whom wait.",
        form="merge FOLDER [-o FILE]",
        examples=[
            Example("pccl trace merge /tmp/t", "of a run with PCCL_TRACE=/tmp/t, and a report"),
            Example("pccl trace merge /tmp/t -o run.json", "the same, into another file"),
        ],
        then="copy the files of all machines into one folder first.",
    )
    command.add_argument("action", choices=["merge"], help="what to do with them (required)")
    words = "folder with the traces, as PCCL_TRACE named it (required)"
    command.add_argument("folder", metavar="FOLDER", help=words)
    words = "write the merged trace there (default: FOLDER/merged.json)"
    command.add_argument("-o", "--output", metavar="FILE", help=words)


def _straggler_timeout(text: str) -> str:
    """Checks what the engine reads."""
    if text == "none":
        return text
    try:
        seconds(0.001, 1e8)(text)
    except argparse.ArgumentTypeError:
        sentence = f"must be seconds in 0.001..1e8, or `none`, not {text!r}"
        raise argparse.ArgumentTypeError(sentence) from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; default: the process's.

    Returns:
        The exit status. 2: the command was called wrongly, or cannot begin.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed from the start
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # peers' names, and our ellipsis
    try:
        status = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # e.g. our reader was `head`
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        _discard_output()
        screen.failure("pccl", f"cannot write the output: {error.strerror}")
        return 1


def _discard_output() -> None:
    """Sends to nowhere what is left in buffers, which would raise again when Python ends."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def _main(given: list[str]) -> int:
    program: list[str] | None = None
    # argparse's own reading of -- differs between versions.
    if given[:1] == ["run"] and "--" in given:
        at = given.index("--")
        given, program = given[:at], given[at + 1 :]
    top = parser()
    options, unknown = top.parse_known_args(given)
    if options.command is None:
        if unknown:
            top.refuse(unknown)
        top.error(f"give a command: {', '.join(top.commands())}")
    command = top.commands()[options.command]
    if unknown:
        command.refuse(unknown)
    try:
        if options.command == "run":
            return _run(command, options, program)
        if options.command == "master":
            return _master(command, options)
        if options.command == "doctor":
            return doctor.run(options)
        if options.command == "bench":
            return bench.run(options)
        if options.command == "status":
            return show.run(options)
        if options.command == "top":
            return top_command.run(options)
        if options.command in orders.KINDS:
            return orders.run(options)
        if options.command == "trace":
            return trace.run(options)
        return _secret(command, options)
    except Misuse as error:
        screen.failure(command.prog, str(error))
        return MISUSE
    except PCCLError as error:
        screen.failure(command.prog, reason_of(error))
        return MISUSE if isinstance(error, InvalidArgument | InvalidUsage) else 1
    except KeyboardInterrupt:
        return 130


def _hosts(text: str) -> list[Host]:
    try:
        return parse_hosts(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _run(command: Parser, options: argparse.Namespace, program: list[str] | None) -> int:
    ranks = 4 if options.nproc is None else options.nproc
    if options.hosts and options.nproc is not None:
        command.error("give -n for this machine or --hosts for others, not both")
    if not options.hosts and (options.address or options.env):
        command.error("--address and --env belong to --hosts, as in `--hosts alice:4,bob:4`")
    if options.join and (options.hosts or options.show_join):
        command.error("--join is for ranks on this machine, and prints no line to join with")
    if program is None and options.unmarked:
        right = f"pccl run -n {ranks} -- {shlex.join(options.unmarked)}"
        command.error(f"write -- before the program, as in `{right}`")
    if options.unmarked:
        command.refuse(options.unmarked)
    if not program:
        command.error(f"give a program, as in `pccl run -n {ranks} -- python train.py`")
    if options.hosts:
        return launch_on(
            options.hosts,
            program,
            address=options.address,
            ssh=options.ssh,
            python=options.python,
            pass_on=options.env,
            elastic=options.elastic,
            restarts=options.restarts,
            show_join=options.show_join,
        )
    if options.nproc is None:
        right = f"pccl run -n 4 -- {shlex.join(program)}"
        command.error(f"give the number of ranks, as in `{right}`")
    check_program(program)
    if options.join:
        _check_secret(options.join)
    return launch(
        program,
        options.nproc,
        elastic=options.elastic,
        restarts=options.restarts,
        show_join=options.show_join,
        join=options.join,
    )


def _check_secret(masters: str) -> None:
    """Raises Misuse if the masters refuse the secret of this process, as they would the ranks'.

    The ranks wait for masters that do not answer yet, so that is no error here.
    """
    try:
        in_background(lambda: ask_any(masters))
    except (AuthenticationFailed, InvalidArgument, InvalidUsage) as error:
        raise Misuse(reason_of(error)) from None
    except PCCLError:
        pass


def _secret(command: Parser, options: argparse.Namespace) -> int:
    if not options.token:
        print(make_secret())
        return 0
    secret = _core.Secret.from_environment("pccl secret")
    if secret is None:
        command.error("--token needs the run's secret in PCCL_SECRET or PCCL_SECRET_FILE")
    print(web.token(secret))
    return 0


def _master(command: Parser, options: argparse.Namespace) -> int:
    if options.show_token and options.http is None:
        command.error("--show-token needs --http, as in `pccl master --http 48149 --show-token`")
    more: Any = {
        "http": options.http,
        "show_token": options.show_token,
        "straggler_timeout": options.straggler_timeout,
        "relay": False if options.no_relay else None,
        "min_peers": options.min_peers,
        "peers": options.peers,
        "place": options.place,
    }
    if options.place is not None and options.peers is None:
        command.error("--place is a place in --peers; give --peers too")
    given = options.secret_file or any(name in os.environ for name in SECRET_VARIABLES)
    if options.peers is not None and not (options.insecure or given):
        command.error(
            "all masters of --peers need the same secret: make one with `pccl secret`, and give it "
            "to each in --secret-file, PCCL_SECRET or PCCL_SECRET_FILE"
        )
    if not options.insecure:
        return serve_with_secret(options.listen, secret_file=options.secret_file, **more)
    for variable in SECRET_VARIABLES:
        if variable in os.environ:
            command.error(f"--insecure, but {variable} is set; unset it, or drop --insecure")
    return serve(options.listen, **more)
