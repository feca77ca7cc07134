"""`pccl master --http`: the status as a page, as JSON and for Prometheus.

The server never asks the master for a request. One thread takes a status every second, and requests
are answered from the last one, however many come.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import io
import ipaddress
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from pccl import _core
from pccl.errors import InvalidArgument, PCCLError
from pccl.tools.status import Group, Link, Status, Unreadable, read, troubles

__all__ = ["StatusServer", "parsed", "token"]

_SECONDS = 1.0  # between two statuses
_HISTORY = 600  # of them: the last ten minutes
_MEAN = 15  # of them: the operations per second of a point are their mean
_CONNECTIONS = 32  # at a time; more close the oldest
_REQUEST_SECONDS = 10.0  # from the connection to the end of the answer
_FOLDER = Path(__file__).with_name("page")

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_NO_METRICS = "metrics need prometheus_client: pip install 'pccl-collectives[metrics]'\n"
_NO_TOKEN = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>pccl</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<h1>This run has a secret</h1>
<p>The page wants the token derived from it. <code>pccl secret --token</code> prints it, where
PCCL_SECRET or PCCL_SECRET_FILE has the secret.</p>
<form><label>Token <input name="token" type="password" autocomplete="off" required></label>
<button>Open</button></form></html>
"""


def token(secret: _core.Secret) -> str:
    """The token of readers of the status over HTTP: 64 hex digits derived from the run's secret.

    It opens nothing else: neither the secret nor a key of the run follows from it.
    """
    return secret.status_key().hex()


def parsed(listen: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, [HOST]:PORT or PORT, which means 127.0.0.1.

    Raises:
        ValueError: It is none of them.
    """
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT or a port, not {listen!r}")
    return host, int(port)


class Sample(NamedTuple):
    """One point of the page's charts: of all groups together."""

    at: float  # time.monotonic()
    members: int
    operations: int  # in total
    reduced_bytes_per_s: float


class _Seen(NamedTuple):
    """The result of the last question to the master."""

    given: dict[str, Any] | None
    status: Status | None
    failure: str


class _NoStatus(Exception):
    """There is no status, and why."""


_View = Callable[[Status, "_Watch"], bytes]


class _Watch:
    """Takes a status every second, and keeps the last one and the charts' points. *any thread*"""

    def __init__(self, ask: Callable[[], dict[str, Any]]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._seen = _Seen(None, None, "no status yet")
        self._samples: deque[Sample] = deque(maxlen=_HISTORY)
        self._making = threading.Lock()
        self._made_of: _Seen | None = None
        self._made: dict[_View, bytes] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._look()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def seen(self) -> _Seen:
        with self._lock:
            return self._seen

    def made(self, view: _View) -> bytes:
        """A view of the last status, which is made once for all its readers.

        Raises:
            _NoStatus: There is none.
        """
        with self._making:
            seen = self.seen()
            if seen.failure or seen.status is None:
                raise _NoStatus(seen.failure)
            if seen is not self._made_of:
                self._made_of, self._made = seen, {}
            if view not in self._made:
                self._made[view] = view(seen.status, self)
            return self._made[view]

    def history(self) -> list[tuple[float, int, float, float]]:
        """Seconds ago, members, operations per second and bytes per second, the latest last."""
        now = time.monotonic()
        with self._lock:
            samples = list(self._samples)
        points = []
        for i, new in enumerate(samples[1:], 1):
            old = samples[max(0, i - _MEAN)]
            rate = max(0, new.operations - old.operations) / max(new.at - old.at, 1e-3)
            points.append(
                (round(now - new.at, 1), new.members, round(rate, 2), new.reduced_bytes_per_s)
            )
        return points

    def _work(self) -> None:
        while not self._stopped.wait(_SECONDS):
            self._look()

    def _look(self) -> None:
        try:
            given = self._ask()
            status = read(given)
        except (PCCLError, Unreadable) as error:
            self._fail(str(error))
            return
        except Exception as error:  # the thread goes on: old numbers must not look like new ones
            self._fail(f"cannot take the status: {error!r}")
            return
        members = [member for group in status.groups for member in group.members]
        sample = Sample(
            time.monotonic(),
            len(members),
            sum(group.operations for group in status.groups),
            sum(member.reduced_bytes_per_s or 0.0 for member in members),
        )
        with self._lock:
            self._seen = _Seen(given, status, "")
            self._samples.append(sample)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._seen = self._seen._replace(failure=why)


def _page() -> tuple[bytes, str]:
    """The page in one piece, and its Content-Security-Policy: only its own two blocks run."""
    style, script = ((_FOLDER / name).read_text() for name in ("style.css", "script.js"))
    page = (_FOLDER / "index.html").read_text()
    page = page.replace("@STYLE@", style).replace("@SCRIPT@", script)

    def hash_of(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return page.encode(), policy


def _for_the_page(status: Status) -> dict[str, Any]:
    """The status with all its keys, as the page wants it."""

    def link_of(link: Link) -> dict[str, Any]:
        given = dataclasses.asdict(link)
        return {"from": given.pop("from_"), **given}

    def group_of(group: Group) -> dict[str, Any]:
        bare = dataclasses.replace(group, links=())
        return {**dataclasses.asdict(bare), "links": [link_of(link) for link in group.links]}

    bare = dataclasses.replace(status, groups=())
    return {**dataclasses.asdict(bare), "groups": [group_of(group) for group in status.groups]}


def _page_json(status: Status, watch: _Watch) -> bytes:
    page = {
        "status": _for_the_page(status),
        "troubles": troubles(status),
        "history": watch.history(),
    }
    return json.dumps(page).encode()


def _metrics(status: Status, _: _Watch) -> bytes:
    from pccl.tools import metrics

    return metrics.exposition(status)


class StatusServer:
    """Serves a run's status over HTTP. *any thread*

    Args:
        ask: Gives the status, as `_core.ask_status` does. Called by one thread.
        listen: HOST:PORT, or a port of 127.0.0.1. Port 0 takes a free one.
        token: What readers have to show; None: nothing.

    Raises:
        InvalidArgument: It cannot listen there.
    """

    def __init__(
        self, ask: Callable[[], dict[str, Any]], listen: str, token: str | None = None
    ) -> None:
        self._watch = _Watch(ask)
        try:
            host, port = parsed(listen)
            self._server = _Server((host, port), self._watch, token)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            sentence = f"cannot serve HTTP on {listen}: {reason}"
            raise InvalidArgument.because("pccl master", sentence) from None
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)

    @property
    def url(self) -> str:
        """Address of the page, without the token."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(str(self._server.server_address[0])).is_loopback

    def __enter__(self) -> StatusServer:
        self._watch.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self.close()
        self._thread.join()
        self._watch.stop()

    def close(self) -> None:
        """Gives its port back, also when it was never entered."""
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """One thread per connection, and a bounded number of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, listen: tuple[str, int], watch: _Watch, token: str | None) -> None:
        self.watch = watch
        self.token = token
        self.host = listen[0]
        self.page, self.policy = _page()
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}  # the oldest first
        family = socket.getaddrinfo(*listen, type=socket.SOCK_STREAM)[0][0]
        self.address_family = family
        super().__init__(listen, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks the name service for this machine's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[id(request)] = request
            oldest = next(iter(self._open.values())) if len(self._open) > _CONNECTIONS else None
            if oldest is not None:
                del self._open[id(oldest)]
                _shut_down(oldest)  # under the lock, so that its thread has not closed it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        with self._lock:
            for request in self._open.values():
                _shut_down(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is nothing to log."""

    def allows_host(self, host: str) -> bool:
        """Whether a request may name that host. With a token any may.

        A foreign page whose name begins to mean this machine (DNS rebinding) always names a domain.
        """
        if self.token is not None:
            return True
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return "." not in name or name in (self.host.lower(), socket.gethostname().lower())
        return True


def _shut_down(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was faster


class _Bounded(io.RawIOBase):
    """Reads from a connection until a moment, however slowly its bytes come."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self._connection = connection
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One request; HTTP/1.0, so one per connection."""

    server: _Server
    server_version = "pccl"
    sys_version = ""

    def setup(self) -> None:
        self.connection = self.request
        self._end = time.monotonic() + _REQUEST_SECONDS
        self.rfile = io.BufferedReader(_Bounded(self.connection, self._end))
        self._answer_bytes = io.BytesIO()
        self.wfile = self._answer_bytes

    def finish(self) -> None:
        answer = self._answer_bytes.getvalue()
        left = self._end - time.monotonic()
        if answer and left > 0:
            self.connection.settimeout(left)  # of the whole of sendall
            self.connection.sendall(answer)
        self.rfile.close()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path)
            query = parse_qs(path.query, max_num_fields=16)
            allowed = self.server.allows_host(self.headers.get("Host", ""))
        except ValueError:
            self._say(400, "no such address")
            return
        if not allowed:
            self._say(403, "open this page by an IP address, or by the host that --http names")
            return
        if not self._has_token(query.get("token", [""])[0]):
            if path.path == "/":
                policy = "default-src 'none'; form-action 'self'; frame-ancestors 'none'"
                self._answer(401, "text/html", _NO_TOKEN.encode(), policy)
            else:
                self._say(401, "this run has a secret: show the token of `pccl secret --token`")
            return
        views = {
            "/": self._get_page,
            "/page.json": self._get_page_json,
            "/status.json": self._get_status,
            "/metrics": self._get_metrics,
        }
        view = views.get(path.path)
        if view is None:
            self._say(404, f"there is nothing here; try {', '.join(views)}")
        else:
            view()

    do_HEAD = do_GET

    def _refuse(self) -> None:
        self._say(405, "only GET and HEAD", Allow="GET, HEAD")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """For requests that cannot be read."""
        self.request_version = "HTTP/1.0"
        self._say(int(code), "cannot read this request")

    def _has_token(self, in_query: str) -> bool:
        if self.server.token is None:
            return True
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        shown = value.strip() if scheme.lower() == "bearer" else in_query
        return hmac.compare_digest(
            shown.encode(errors="surrogateescape"), self.server.token.encode()
        )

    def _get_page(self) -> None:
        self._answer(200, "text/html", self.server.page, self.server.policy)

    def _get_page_json(self) -> None:
        try:
            self._answer(200, "application/json", self.server.watch.made(_page_json))
        except _NoStatus as error:
            self._say(503, str(error))

    def _get_status(self) -> None:
        seen = self.server.watch.seen()
        if seen.failure:
            self._say(503, seen.failure)
        else:
            self._answer(200, "application/json", json.dumps(seen.given).encode())

    def _get_metrics(self) -> None:
        try:
            from pccl.tools import metrics
        except ImportError:
            self._say(501, _NO_METRICS.strip())
            return
        try:
            text = self.server.watch.made(_metrics)
        except _NoStatus:
            text = metrics.exposition(None)
        self._answer(200, metrics.CONTENT_TYPE, text)

    def _say(self, code: int, sentence: str, **headers: str) -> None:
        self._answer(code, "text/plain", f"{sentence}\n".encode(), **headers)

    def _answer(
        self,
        code: int,
        kind: str,
        body: bytes,
        policy: str = "default-src 'none'; frame-ancestors 'none'",
        **headers: str,
    ) -> None:
        self.send_response(code)
        kind = kind if "charset" in kind else f"{kind}; charset=utf-8"
        more = {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS, **headers}
        if code == 401:
            more["WWW-Authenticate"] = 'Bearer realm="pccl"'
        for name, value in {**more, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
