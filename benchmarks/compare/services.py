"""Runs a service that a library needs beside its ranks. Prints one line of JSON, and stays until
its standard input ends.

    services.py dht          a first peer of hivemind's hash table; prints its addresses
    services.py stores N     N stores, as torchrun holds them for N replicas; prints their ports
"""

from __future__ import annotations

import json
import sys


def dht() -> list[str]:
    import hivemind

    node = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    kept.append(node)
    return [str(address) for address in node.get_visible_maddrs()]


def stores(count: int) -> list[int]:
    from torch.distributed import TCPStore

    for _ in range(count):
        kept.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    return [store.port for store in kept]


kept: list = []

if __name__ == "__main__":
    found = dht() if sys.argv[1] == "dht" else stores(int(sys.argv[2]))
    print(json.dumps(found), flush=True)
    sys.stdin.read()
