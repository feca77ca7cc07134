"""A master as a program of its own: what `pccl master` and `pccl_master` run."""

from __future__ import annotations

import ipaddress
import os
import resource
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from pccl import _core, _masters, _settings
from pccl._settings import DEFAULT_PORT
from pccl.communicator import MasterNode
from pccl.errors import InvalidArgument, PCCLError
from pccl.tools import screen, web
from pccl.tools.parsing import MISUSE, Example, Parser, endpoint, reason_of

__all__ = ["main", "make_secret", "parser", "serve", "serve_with_secret"]

DEFAULT_LISTEN = f"0.0.0.0:{DEFAULT_PORT}"


def make_secret() -> str:
    """A new secret: 32 random bytes, as 43 characters that need no quotes."""
    return secrets.token_urlsafe(32)


def serve_with_secret(
    listen: str,
    *,
    secret_file: str | None = None,
    straggler_timeout: str | None = None,
    relay: bool | None = None,
    min_peers: int = 1,
    http: str | None = None,
    show_token: bool = False,
    peers: str | None = None,
    place: int | None = None,
) -> int:
    """As `serve`, for a master with a secret. Also prints the line to join with.

    Args:
        listen: "host:port" to listen on.
        secret_file: File with the secret. If there is none, it is made, readable for this user
            only. Default: PCCL_SECRET or PCCL_SECRET_FILE; without any of them a secret is made and
            printed.
        straggler_timeout, relay, min_peers, http, peers, place: As of `serve`.
        show_token: As of `serve`. The token of a secret that is printed is printed as well.
    """
    join = "PCCL_SECRET=..."
    secret: str | _core.Secret | None = None
    try:
        if secret_file is not None:
            secret = _secret_in(secret_file)
            join = f"PCCL_SECRET_FILE={shlex.quote(os.path.abspath(secret_file))}"
        elif path := _settings.text("PCCL_SECRET_FILE"):
            join = f"PCCL_SECRET_FILE={shlex.quote(os.path.abspath(path))}"
        elif not any(name in os.environ for name in _settings.SECRET_VARIABLES):
            secret = make_secret()
            join = f"PCCL_SECRET={secret}"
            show_token = True
    except PCCLError as error:
        return _failed(error)
    return serve(
        listen,
        straggler_timeout=straggler_timeout,
        relay=relay,
        secret=secret,
        join=join,
        min_peers=min_peers,
        http=http,
        show_token=show_token,
        peers=peers,
        place=place,
    )


def _secret_in(path: str) -> _core.Secret:
    """The secret in a file, read as peers read it, byte for byte."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w") as file:
                file.write(make_secret() + "\n")
        except OSError:  # a full disk: an empty file would be taken for the secret's
            os.unlink(path)
            raise
    except FileExistsError:
        pass
    except OSError as error:
        sentence = f"cannot make the secret's file {path}: {error.strerror}"
        raise InvalidArgument.because("pccl master", sentence) from None
    return _core.Secret.from_file(path, "pccl master")


def _failed(error: PCCLError, command: str = "pccl master") -> int:
    screen.failure(command, reason_of(error))
    return MISUSE


def _as_others_see(address: str) -> str:
    """`address`, with one of this machine's addresses instead of "all interfaces"."""
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):
        return address
    # An address reserved for documentation selects the interface that leads out; nothing is sent.
    ways = [(socket.AF_INET, "192.0.2.1", "{}")]
    if host == "[::]":
        ways.append((socket.AF_INET6, "2001:db8::1", "[{}]"))
    for family, outside, written in ways:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            return f"{written.format(probe.getsockname()[0])}:{port}"
    # Without a default route. The host's name often means 127.0.0.1.
    for found in _core.interface_addresses():
        is_ipv6 = ":" in found
        if ipaddress.ip_address(found).is_loopback or (is_ipv6 and host != "[::]"):
            continue
        return f"[{found}]:{port}" if is_ipv6 else f"{found}:{port}"
    return f"{socket.gethostname()}:{port}"


def serve(
    listen: str,
    *,
    straggler_timeout: str | None = None,
    relay: bool | None = None,
    secret: str | _core.Secret | None = None,
    join: str | None = None,
    min_peers: int = 1,
    peers: str | None = None,
    place: int | None = None,
    command: str = "pccl master",
    http: str | None = None,
    show_token: bool = False,
) -> int:
    """Prints `listening on HOST:PORT` and serves until SIGINT or SIGTERM.

    Without PCCL_LOG_LEVEL it logs at INFO: peers that join, those that are out and why, and how
    many go on.

    Args:
        listen: "host:port" to listen on.
        straggler_timeout: Seconds, instead of PCCL_STRAGGLER_TIMEOUT.
        relay: Whether to relay between peers that cannot connect, instead of PCCL_RELAY.
        min_peers: As of `MasterNode`.
        peers: The addresses of all masters of the run, this one included, the preferred one first.
        place: This master's place in that list, from 1. Default: the one that listens on `listen`.
        secret: The run's secret. Default: the environment's, if there is one.
        join: The secret's part of the line to join with, to be printed.
        command: What its errors begin with.
        http: "host:port" of the status page, or a port of 127.0.0.1. Its address is printed, too.
        show_token: Whether that address is printed with the token derived from the secret.

    Returns:
        The exit status: 0, or 2 when it could not listen.
    """
    if straggler_timeout is not None:
        os.environ["PCCL_STRAGGLER_TIMEOUT"] = straggler_timeout
    if not _settings.text("PCCL_LOG_LEVEL"):
        os.environ["PCCL_LOG_LEVEL"] = "INFO"
    if relay is not None:
        os.environ["PCCL_RELAY"] = str(int(relay))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # There may be more connections than the usual limit, which is for programs with select().
        with suppress(OSError, ValueError):  # macOS refuses its own hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (files[1], files[1]))
        known = _settings.secret(secret, command)
        with ExitStack() as stack:
            standing = _standing(listen, peers, place)
            master = MasterNode(listen, secret=known, min_peers=min_peers, place=standing)
            token = None if known is None or http is None else web.token(known)
            page = None
            if http is not None:  # before anything is printed: the port may be taken
                page = web.StatusServer(master.status, http, token)
                stack.callback(page.close)
            stack.enter_context(master)
            print(f"listening on {master.address}", flush=True)
            if join is not None:
                where = peers or _as_others_see(master.address)
                print(f"join with: PCCL_MASTER={where} {join} python train.py", flush=True)
            if page is not None:
                stack.enter_context(page)
                end = f"?token={token}" if token is not None and show_token else ""
                print(f"status page: {page.url}{end}", flush=True)
                if known is None and not page.on_loopback:
                    sentence = "without a secret anybody who reaches the page may read it"
                    screen.note(command, sentence)
            master.wait()
    except KeyboardInterrupt:
        pass
    except PCCLError as error:
        return _failed(error, command)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        signal.signal(signal.SIGTERM, before)
    return 0


def _standing(listen: str, peers: str | None, place: int | None) -> tuple[int, int]:
    """The master's index among all masters, and how many there are."""
    func = "pccl master"
    if peers is None:
        return 0, 1
    masters = _core.parse_masters(peers, func)
    if place is None:
        return _masters.place_of(listen, masters, func), len(masters)
    if not 1 <= place <= len(masters):
        sentence = f"--place must be in 1..{len(masters)}, as --peers has so many, not {place}"
        raise InvalidArgument.because(func, sentence)
    return place - 1, len(masters)


def parser() -> Parser:
    """The parser of `pccl_master`."""
    made = Parser(
        prog="pccl_master",
        description="Runs a master until Ctrl-C. It has a secret only if the environment has one.",
        examples=[
            Example("pccl_master", "on all interfaces"),
            Example("PCCL_SECRET=... pccl_master --listen-address [::]:5000", "with a secret"),
        ],
        then="prefer `pccl master`, which makes a secret and prints the line to join with.",
    )
    words = "where to listen; port 0 takes a free one (default: %(default)s)"
    made.add_argument(
        "--listen-address", type=endpoint, default=DEFAULT_LISTEN, metavar="HOST:PORT", help=words
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The `pccl_master` command."""
    made = parser()
    options, unknown = made.parse_known_args(argv)
    if unknown:
        made.refuse(unknown)
    return serve(options.listen_address, command=made.prog)


if __name__ == "__main__":
    sys.exit(main())
