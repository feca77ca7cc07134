"""try_wheel.py [--bare]: uses an installed wheel as a user would.

Two ranks of `pccl run`, then two peers and a master with PCCL_SECRET over TCP, then a peer with
another secret. Where Python has an ssl module, each rank also does TLS with it before, between and
after, so that two OpenSSLs work in one process. --bare: there must be no compiler and no OpenSSL.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SECRET = "a secret for one test, " + "0123456789abcdef" * 2
LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib"]
HEADERS = ["/usr/include/asio.hpp", "/usr/include/openssl"]


def python_tls() -> str:
    """A TLS connection between two ends in memory, by Python's OpenSSL; its version."""
    try:
        import ssl
    except ImportError:
        return "no ssl module"
    ends = []
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    for purpose in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = ssl.SSLContext(purpose)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("aNULL:@SECLEVEL=0")  # needs no certificate
        server = purpose == ssl.PROTOCOL_TLS_SERVER
        pair = (outgoing, incoming) if server else (incoming, outgoing)
        ends.append(context.wrap_bio(*pair, server_side=server))
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
    ends[0].write(b"through it")
    assert ends[1].read() == b"through it"
    return ssl.OPENSSL_VERSION


def rank() -> None:
    before = python_tls()
    import numpy as np

    import pccl
    import pccl._core

    version, bundled = pccl._core.openssl()
    assert bundled, version
    pccl.init()
    for dtype in ("int32", "float32", "float64"):
        for size in (1, 1000, 1 << 20):
            mine = (np.arange(size) % 1000).astype(dtype) * (pccl.rank() + 1)
            done = pccl.allreduce(mine)
            assert (done == (np.arange(size) % 1000).astype(dtype) * 3).all()
            assert python_tls() == before
    assert hashlib.sha256(b"abc").hexdigest().startswith("ba7816bf")
    if pccl.rank() == 0:
        print(f"ranks: {version} in pccl, {before} in Python", flush=True)
    pccl.shutdown()


def with_secret(me: list[str]) -> None:
    environment = {**os.environ, "PCCL_SECRET": SECRET, "PCCL_SHM": "0", "PCCL_MIN_PEERS": "2"}
    command = [sys.executable, "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as master:
        try:
            assert master.stdout is not None
            environment["PCCL_MASTER"] = master.stdout.readline().split()[-1]
            peers = [subprocess.Popen([*me, "rank"], env=environment) for _ in range(2)]
            assert [peer.wait(120) for peer in peers] == [0, 0]
            other = {**environment, "PCCL_SECRET": SECRET[::-1], "PCCL_MIN_PEERS": "1"}
            stranger = subprocess.run(
                [*me, "rank"], env=other, capture_output=True, text=True, timeout=120
            )
            assert stranger.returncode != 0 and "secret" in stranger.stderr, stranger.stderr
        finally:
            master.terminate()


def main() -> None:
    me = [sys.executable, os.path.abspath(__file__)]
    if "rank" in sys.argv:
        rank()
        return
    if "--bare" in sys.argv:
        tools = [name for name in ("cc", "c++", "gcc", "g++", "clang") if shutil.which(name)]
        files = [path for folder in LIBRARIES for path in Path(folder).rglob("*.so*")]
        libraries = [path for path in files if re.match(r"lib(ssl|crypto)[.-]", path.name)]
        headers = [path for path in HEADERS if os.path.exists(path)]
        assert not tools and not libraries and not headers, (tools, libraries, headers)
    run = [sys.executable, "-m", "pccl", "run", "-n", "2", "--"]
    subprocess.run([*run, *me, "rank"], check=True, timeout=120)
    with_secret(me)
    libc = " ".join(platform.libc_ver())
    print(f"passed: Python {platform.python_version()}, {libc}, {sys.argv[1:]}", flush=True)


if __name__ == "__main__":
    main()
