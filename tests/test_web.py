"""`pccl master --http`: the server of the status page, and what it keeps out."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import statuses

from pccl.errors import InvalidArgument
from pccl.tools import web

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy" / "prometheus" / "pccl.rules.yml"
TOKEN = "00c0ffee" * 8


@pytest.fixture
def master() -> statuses.Master:
    return statuses.Master(statuses.example())


@pytest.fixture
def server(master: statuses.Master) -> Iterator[web.StatusServer]:
    with web.StatusServer(master, "0") as made:
        yield made


def get(
    server: web.StatusServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    """The answer to a request, and its body."""
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()
    finally:
        connection.close()


def connected(server: web.StatusServer) -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((where.hostname, where.port), timeout=60)


def test_a_view_is_made_once_for_all_readers(
    server: web.StatusServer, master: statuses.Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    view = web._for_the_page
    monkeypatch.setattr(web, "_for_the_page", lambda status: (made.append(status), view(status))[1])
    for _ in range(20):
        assert get(server, "/page.json")[0].status == 200
    assert len({id(status) for status in made}) == len(made)


def test_an_error_that_nobody_expects_is_shown_and_the_next_status_too() -> None:
    asked = 0

    def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RuntimeError("of the master")
        return statuses.example()

    watch = web._Watch(ask)
    for words in ("", "cannot take the status: RuntimeError('of the master')", ""):
        watch._look()
        assert watch.seen().failure == words


def test_a_bare_port_is_of_this_machine_alone(server: web.StatusServer) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.url)


def test_an_address_that_makes_no_sense_is_refused(server: web.StatusServer) -> None:
    taken = urlsplit(server.url).netloc
    for listen, words in {
        "x": "must be HOST:PORT or a port",
        "127.0.0.1:70000": "must be HOST:PORT or a port",
        "192.0.2.1:0": "Cannot assign requested address",
        taken: "Address already in use",
    }.items():
        with pytest.raises(InvalidArgument, match=words):
            web.StatusServer(dict, listen)


def test_status_json_is_the_status_as_it_came(
    server: web.StatusServer, master: statuses.Master
) -> None:
    answer, body = get(server, "/status.json")
    assert answer.status == 200 and answer.headers["Content-Type"].startswith("application/json")
    assert json.loads(body) == master.status


def test_page_json_has_the_points_of_the_last_minutes(
    server: web.StatusServer, master: statuses.Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert master.status is not None
    master.status["groups"][0]["operations"] += 100
    deadline = time.monotonic() + 60
    while not (history := json.loads(get(server, "/page.json")[1])["history"]):
        assert time.monotonic() < deadline
        master.asked.clear()
        assert master.asked.wait(30)
    ago, members, operations, reduced = history[-1]
    assert ago >= 0 and members == 5 and 0 < operations <= 100 and reduced > 1e8


def test_the_points_are_bounded() -> None:
    watch = web._Watch(statuses.Master(statuses.example()))
    for _ in range(web._HISTORY + 50):
        watch._look()
    assert len(watch.history()) == web._HISTORY - 1


def test_only_the_page_s_own_style_and_script_may_run(server: web.StatusServer) -> None:
    answer, body = get(server, "/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert policy.count("'sha256-") == 2
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", body) == ["data:,", "status.json", "metrics"]
    assert "@import" not in body and "url(" not in body


@pytest.mark.parametrize("path", ["/", "/status.json", "/page.json", "/metrics", "/nothing"])
def test_every_answer_has_the_headers_that_protect_it(server: web.StatusServer, path: str) -> None:
    for method in ("GET", "HEAD"):
        answer, body = get(server, path, method)
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.status == (404 if path == "/nothing" else answer.status)
        assert bool(body) == (method == "GET")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(server: web.StatusServer, method: str) -> None:
    answer, body = get(server, "/status.json", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert body == "only GET and HEAD\n"


def test_with_a_secret_every_address_wants_the_token(master: statuses.Master) -> None:
    with web.StatusServer(master, "0", TOKEN) as server:
        for path in ("/", "/status.json", "/page.json", "/metrics", "/nothing"):
            for shown in ({}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, {"Authorization": TOKEN}):
                answer, body = get(server, path, **shown)
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert "berlin" not in body and TOKEN not in body
        assert get(server, f"/status.json?token={TOKEN}x")[0].status == 401
        assert get(server, "/status.json?token=%FF%FE")[0].status == 401
        assert get(server, f"/status.json?token={TOKEN}")[0].status == 200
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert get(server, "/status.json", **bearer)[0].status == 200
        assert get(server, "/status.json", Host="example.org", **bearer)[0].status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("[::1]:1", 200),
        ("localhost:1", 200),
        ("trainbox", 200),
        ("evil.example.org", 403),
        ("evil.example.org:48149", 403),
        ("127.0.0.1.example.org", 403),
        ("[::1", 400),
    ],
)
def test_a_foreign_page_cannot_read_it_under_a_name_of_its_own(
    server: web.StatusServer, host: str, status: int
) -> None:
    assert get(server, "/status.json", Host=host)[0].status == status


@pytest.mark.parametrize(
    "request_of",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /status.json HTTP/9\r\n\r\n",
        b"GET //[ HTTP/1.0\r\n\r\n",
        b"GET /?" + b"&".join(b"a=1" for _ in range(99)) + b" HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"BREW / HTTP/1.0\r\n\r\n",
        bytes(range(256)),
    ],
)
def test_requests_that_make_no_sense_cost_their_connection_alone(
    server: web.StatusServer, request_of: bytes
) -> None:
    with connected(server) as connection:
        connection.sendall(request_of)
        connection.shutdown(socket.SHUT_WR)
        said = b""
        try:
            while data := connection.recv(1 << 16):
                said += data
        except ConnectionResetError:
            pass  # it had more to say than the server reads
    assert b"200 OK" not in said and b"berlin" not in said
    assert get(server, "/status.json")[0].status == 200


def test_a_request_that_comes_byte_by_byte_is_cut_off(
    master: statuses.Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_REQUEST_SECONDS", 0.5)
    with web.StatusServer(master, "0") as server, connected(server) as connection:
        begun = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() < begun + 60:
                connection.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() < begun + 30


def test_more_connections_than_allowed_close_the_oldest(server: web.StatusServer) -> None:
    with connected(server) as oldest:
        others = [connected(server) for _ in range(web._CONNECTIONS)]
        assert oldest.recv(100) == b""
        assert get(server, "/status.json")[0].status == 200
        for connection in others:
            connection.close()


def test_a_master_that_gives_no_status_is_told(
    server: web.StatusServer, master: statuses.Master
) -> None:
    master.status = None
    master.asked.clear()
    deadline = time.monotonic() + 60
    while get(server, "/status.json")[0].status == 200:
        assert time.monotonic() < deadline
        assert master.asked.wait(30)
    answer, body = get(server, "/page.json")
    assert answer.status == 503 and "Connection refused" in body
    assert get(server, "/")[0].status == 200


# Metrics.


def samples(text: str) -> dict[str, float]:
    """Name and labels -> value."""
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        for one in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def test_metrics_tell_the_run(server: web.StatusServer) -> None:
    pytest.importorskip("prometheus_client")
    answer, body = get(server, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = samples(body)
    assert found["pccl_up"] == 1
    assert found["pccl_info{run=8c1f27d90b5ae364,software=pccl 0.1.0}"] == 1
    assert found["pccl_evictions_total"] == 3 and found["pccl_master_restarts_total"] == 1
    assert found["pccl_group_members{group=0}"] == 5
    assert found["pccl_group_operations_total{group=0}"] == 1204
    assert found["pccl_group_links{group=0,state=silent}"] == 1
    assert found["pccl_group_slowest_link_bytes_per_second{group=0}"] == 610_000
    brief = statuses.EXAMPLE["groups"][0]["members"][4]["id"][:8]
    of = f"{{group=0,id={brief},name=lagos-laptop}}"
    assert found[f"pccl_member_held_up_seconds{of}"] == 14.2
    assert found[f"pccl_member_sent_bytes_total{of}"] == 8_791_261_184


def test_series_do_not_grow_with_pairs_of_members(master: statuses.Master) -> None:
    metrics = pytest.importorskip("pccl.tools.metrics", exc_type=ImportError)
    from pccl.tools.status import read

    assert master.status is not None
    group = master.status["groups"][0]
    few = len(samples(metrics.exposition(read(master.status)).decode()))
    group["links"] = [
        {**group["links"][0], "from": a, "to": b} for a in range(50) for b in range(50) if a != b
    ]
    assert len(samples(metrics.exposition(read(master.status)).decode())) == few


def test_labels_of_peers_cannot_break_the_text(master: statuses.Master) -> None:
    metrics = pytest.importorskip("pccl.tools.metrics", exc_type=ImportError)
    from pccl.tools.status import read

    assert master.status is not None
    name = 'a"} 1\npccl_up{x="\\'
    master.status["groups"][0]["members"][4]["name"] = name
    found = samples(metrics.exposition(read(master.status)).decode())
    assert found["pccl_up"] == 1 and [key for key in found if key.startswith("pccl_up")] == [
        "pccl_up"
    ]


def test_without_prometheus_client_metrics_name_the_extra(
    server: web.StatusServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "pccl.tools.metrics", raising=False)
    monkeypatch.delattr("pccl.tools.metrics", raising=False)
    answer, body = get(server, "/metrics")
    assert answer.status == 501
    assert "pccl-collectives[metrics]" in body


def test_the_example_rules_name_metrics_that_there_are() -> None:
    metrics = pytest.importorskip("pccl.tools.metrics", exc_type=ImportError)
    from pccl.tools.status import read

    known = {name.partition("{")[0] for name in samples(
        metrics.exposition(read(statuses.example())).decode())}  # fmt: skip
    named = set(re.findall(r"\bpccl_\w+", " ".join(re.findall(r"expr: (.*)", RULES.read_text()))))
    assert named and named <= known


@contextmanager
def prometheus(folder: Path, config: str) -> Iterator[str]:
    """A Prometheus with that configuration; yields its URL."""
    (folder / "prometheus.yml").write_text(config)
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                found = re.search(r"127\.0\.0\.1:[1-9]\d*", line)
                if found and "Listening on" in line:
                    break
            else:
                raise AssertionError("".join(said))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield f"http://{found[0]}"
        finally:
            process.kill()


def ready(url: str) -> bool:
    """Whether that Prometheus answers queries."""
    try:
        with urlopen(f"{url}/-/ready", timeout=30) as answer:
            return bool(answer.status == 200)
    except OSError:  # 503 is one
        return False


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Debian's package prometheus")
def test_the_example_files_are_valid(tmp_path: Path) -> None:
    for command in (["rules", RULES.name], ["config", "prometheus.yml"]):
        done = subprocess.run(
            ["promtool", "check", *command],
            cwd=RULES.parent,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_it_and_its_alerts_fire(
    tmp_path: Path, master: statuses.Master
) -> None:
    pytest.importorskip("prometheus_client")
    assert master.status is not None
    master.status["groups"][0]["calls"][0]["seconds"] = 75.0
    (tmp_path / "token").write_text(TOKEN)
    with web.StatusServer(master, "0", TOKEN) as server:
        config = (RULES.parent / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:48149", urlsplit(server.url).netloc)
        config = config.replace("pccl.rules.yml", str(RULES)).replace("5s", "1s")
        config = config.replace("# authorization", "authorization")
        config = config.replace("/etc/prometheus/pccl.token", str(tmp_path / "token"))
        with prometheus(tmp_path, config) as url:

            def ask(path: str) -> Any:
                with urlopen(url + path, timeout=30) as answer:
                    return json.load(answer)["data"]

            deadline = time.monotonic() + 60
            while not ready(url):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            while True:
                alerts = {
                    (one["labels"]["alertname"], one["labels"].get("name"))
                    for one in ask("/api/v1/alerts")["alerts"]
                    if one["state"] == "firing"
                }
                if ("PcclMemberWaitedFor", "lagos-laptop") in alerts:
                    break
                assert time.monotonic() < deadline, ask("/api/v1/targets")
                time.sleep(0.1)
            (found,) = ask("/api/v1/query?query=pccl_group_members")["result"]
            assert found["value"][1] == "5" and found["metric"]["job"] == "pccl"
