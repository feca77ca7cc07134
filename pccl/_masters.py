"""Several masters of one run: their addresses, and which of them this process is."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence

from pccl import _core
from pccl.errors import InvalidArgument, InvalidUsage, PCCLError
from pccl.master_node import MasterNode

__all__ = ["place_of", "standby"]

Address = tuple[str, int]


def _hosts(host: str) -> set[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return {host}
    return {str(item[4][0]) for item in found}


def _is_here(host: str) -> bool:
    """Whether the host is this machine."""
    own = set(_core.interface_addresses()) | {"::1", "0.0.0.0", "::", ""}
    return any(known in own or known.startswith("127.") for known in _hosts(host))


def place_of(listen: str, masters: Sequence[Address], func: str) -> int:
    """Which of `masters` listens on `listen`: its index.

    Raises:
        InvalidArgument: None of them does, or several may.
    """
    host, port = _core.parse_masters(listen, func)[0]
    any_host = host in ("", "0.0.0.0", "::")
    found = [
        index
        for index, (other, other_port) in enumerate(masters)
        if other_port == port
        and (other == host or (_is_here(other) if any_host else bool(_hosts(other) & _hosts(host))))
    ]
    if len(found) == 1:
        return found[0]
    what = "none" if not found else "several"
    sentence = f"{what} of the masters may be the one on {listen}; give its place in the list"
    raise InvalidArgument.because(func, sentence)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _listen(host: str, port: int) -> str:
    """Where the master with this address listens."""
    # This machine may know its own name as an address that no other one reaches: 127.0.1.1 on
    # Debian.
    if _is_name(host) and host.lower() != "localhost":
        return f":{port}"  # all interfaces
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own(masters: Sequence[Address]) -> Iterator[tuple[int, str]]:
    for index, (host, port) in enumerate(masters):
        if _is_here(host):
            yield index, _listen(host, port)


def standby(addresses: str, secret: _core.Secret | None, func: str) -> MasterNode:
    """Runs one of these masters in this process: the first of this machine whose port is free.

    Raises:
        InvalidArgument: There is one address only.
        InvalidUsage: No address of this machine can be bound.
    """
    masters = _core.parse_masters(addresses, func)
    if len(masters) < 2:
        sentence = "a standby needs the addresses of all masters, as in 'host-a:48148,host-b:48148'"
        raise InvalidArgument.because(func, sentence)
    why = "none of the masters' addresses is one of this machine"
    for index, listen in _own(masters):
        node = MasterNode(listen, secret=secret, place=(index, len(masters)))
        try:
            node.run()
        except PCCLError as error:
            why = error.reason or str(error)
            continue
        return node
    raise InvalidUsage.because(func, f"this process can be no standby: {why}")
