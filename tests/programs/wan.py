"""Ends of connections, run on hosts of the wide-area lab without pccl."""

from __future__ import annotations

import socket
import sys
import time


def be_refused(host: str) -> None:
    """Prints the milliseconds of a connection that is refused: one round trip."""
    for _ in range(10):
        with socket.socket() as s:
            begin = time.perf_counter()
            try:
                s.connect((host, 9))
            except ConnectionRefusedError:
                print(1e3 * (time.perf_counter() - begin))


def receive() -> None:
    """Takes one connection. Prints the bytes a second after the first ones, or how it ended."""
    listener = socket.create_server(("0.0.0.0", 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    print("receiving", flush=True)
    count, begin = 0, 0.0
    try:
        count, begin = len(connection.recv(1)), time.perf_counter()
        while data := connection.recv(1 << 20):
            count += len(data)
        print(count / (time.perf_counter() - begin))
    except ConnectionResetError:
        print("reset")


def send(host: str, port: int, count: int) -> None:
    """Sends so many bytes; with -1, until the connection breaks."""
    connection = socket.create_connection((host, port))
    print("connected", flush=True)
    left = count
    try:
        while left != 0:
            left -= connection.send(bytes(1 << 16)[:left] if left > 0 else bytes(1 << 16))
        print("sent")
    except ConnectionResetError:
        print("reset")


def send_datagrams(host: str, count: int) -> None:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(count):
        s.sendto(bytes(100), (host, 9))


def hold_a_lab(folder: str) -> None:
    """Makes a lab, prints its parts, and keeps it until its input ends. `folder`: of lab.py."""
    sys.path.insert(0, folder)
    from lab import Host, Lab  # type: ignore[import-not-found]

    with Lab([Host()] * 2) as world:
        print(world._relay.pid, world.namespace(0), world.namespace(1), flush=True)
        sys.stdin.read()
