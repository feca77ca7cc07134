"""Several masters of one run: their addresses, and which of them this process is."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Thread

from pccl import _core, _settings
from pccl.errors import InvalidArgument, InvalidUsage, PCCLError
from pccl.master_node import MasterNode

__all__ = ["place_of", "standby"]

Address = tuple[str, int]

_RESOLVE_SECONDS = 6.0  # resolvers usually go on to their second server after 5 s


def _is_name(host: str) -> bool:
    """Whether only a name server, or a file of names, knows the address."""
    for read in (ipaddress.ip_address, socket.inet_aton):  # the second also takes 127.1
        with suppress(ValueError, OSError):
            read(host)
            return False
    return host != ""


_LOOPBACK_NAMES = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


def _is_loopback_name(host: str) -> bool:
    """Whether that name means this machine, and is not the machine's own."""
    name = host.lower().rstrip(".").removesuffix(".localdomain")
    return name in _LOOPBACK_NAMES or name.endswith(".localhost")


def _resolve(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return {host}
    return {str(item[4][0]) for item in found}


def _resolved(hosts: Iterable[str], timeout: float | None) -> dict[str, set[str]]:
    """The addresses of those hosts that are resolved within `timeout` seconds; None: of all.

    All are asked for at once. Nobody can stop a resolver, which may take half a minute for a name:
    its thread ends later.
    """
    known: dict[str, set[str]] = {}

    def resolve(host: str) -> None:
        known[host] = _resolve(host)

    limit = _settings.Deadline(timeout)
    wanted = set(hosts)
    for host in wanted:
        if not _is_name(host):
            resolve(host)  # at once
    threads = [Thread(target=resolve, args=(host,), daemon=True) for host in wanted - known.keys()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit.left())
    return known.copy()  # without those that come later


def _is_here(addresses: set[str]) -> bool:
    """Whether one of the addresses is this machine's."""
    own = set(_core.interface_addresses()) | {"::1", "0.0.0.0", "::", ""}
    return any(known in own or known.startswith("127.") for known in addresses)


def place_of(listen: str, masters: Sequence[Address], func: str) -> int:
    """Which of `masters` listens on `listen`: its index.

    Raises:
        InvalidArgument: None of them does, or several may.
    """
    host, port = _core.parse_masters(listen, func)[0]
    any_host = host in ("", "0.0.0.0", "::")
    same_port = {index: other for index, (other, used) in enumerate(masters) if used == port}
    known = _resolved([host, *same_port.values()], None)
    found = [
        index
        for index, other in same_port.items()
        if other == host
        or (_is_here(known[other]) if any_host else bool(known[other] & known[host]))
    ]
    if len(found) == 1:
        return found[0]
    what = "none" if not found else "several"
    sentence = f"{what} of the masters may be the one on {listen}; give its place in the list"
    raise InvalidArgument.because(func, sentence)


def _listen(host: str, port: int) -> str:
    """Where the master with this address listens."""
    # This machine may know its own name as an address that no other one reaches: 127.0.1.1 on
    # Debian.
    if _is_name(host) and not _is_loopback_name(host):
        return f":{port}"  # all interfaces
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def standby(
    addresses: str, secret: _core.Secret | None, func: str, timeout: float | None = None
) -> MasterNode:
    """Runs one of these masters in this process: the first of this machine whose port is free.

    Names that are not resolved in time are taken for other machines'. This takes at most half of
    `timeout` seconds, so that time to join is left.

    Raises:
        InvalidArgument: There is one address only.
        InvalidUsage: No address of this machine can be bound.
    """
    masters = _core.parse_masters(addresses, func)
    if len(masters) < 2:
        sentence = "a standby needs the addresses of all masters, as in 'host-a:48148,host-b:48148'"
        raise InvalidArgument.because(func, sentence)
    limit = _RESOLVE_SECONDS if timeout is None else min(timeout / 2, _RESOLVE_SECONDS)
    known = _resolved((host for host, _ in masters), limit)
    why = "none of the masters' addresses is one of this machine"
    if late := [host for host, _ in masters if host not in known]:
        why += f"; not resolved within {limit:g} s: {', '.join(late)}"
    for index, (host, port) in enumerate(masters):
        if not _is_here(known.get(host, set())):
            continue
        node = MasterNode(_listen(host, port), secret=secret, place=(index, len(masters)))
        try:
            node.run()
        except PCCLError as error:
            why = error.reason or str(error)
            continue
        return node
    raise InvalidUsage.because(func, f"this process can be no standby: {why}")
