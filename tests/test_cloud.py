"""Files of deploy/cloud/: user data, and the program that waits for a cloud's notice."""

from __future__ import annotations

import ast
import configparser
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "cloud"
NOTICE = FOLDER / "notice.py"
QUESTIONS = 3  # before the cloud announces anything

AWS = ("/latest/meta-data/spot/instance-action", "X-aws-ec2-metadata-token", "secret")
GCP = ("/computeMetadata/v1/instance/preempted", "Metadata-Flavor", "Google")
AZURE = ("/metadata/scheduledevents?api-version=2020-07-01", "Metadata", "true")
EVENT = '{"Events": [{"EventType": "%s", "Resources": ["%s"]}]}'
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


@contextmanager
def metadata(answers: Callable[[str, str, int], tuple[int, str]]) -> Iterator[str]:
    """A metadata service; `answers` gets method, path and the number of the question."""
    asked: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] = asked.get(self.path, 0) + 1
            status, text = answers(self.command, self.path, asked[self.path])
            for path, header, value in (AWS, GCP, AZURE, (NAME, *AZURE[1:])):
                if self.path == path and self.headers[header] != value:
                    status, text = 401, ""
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
    assert max(asked.values()) >= QUESTIONS


def noticed(cloud: str, base: str) -> str:
    """The standard error of the program, whose command has run."""
    command = [sys.executable, str(NOTICE), "--metadata", base, "--every", "0.01", cloud]
    done = subprocess.run(
        [*command, sys.executable, "-c", "print('stopped')"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "stopped\n"
    return done.stderr


def test_the_command_runs_when_aws_announces_an_end() -> None:
    def answers(method: str, path: str, number: int) -> tuple[int, str]:
        if path == "/latest/api/token":
            return (200, "secret") if method == "PUT" else (405, "")
        return (404, "") if number < QUESTIONS else (200, '{"action": "terminate"}')

    with metadata(answers) as base:
        assert noticed("aws", base) == "notice: aws takes this machine back\n"


def test_the_command_runs_when_gcp_announces_an_end() -> None:
    def answers(_: str, __: str, number: int) -> tuple[int, str]:
        return 200, "TRUE" if number >= QUESTIONS else "FALSE"

    with metadata(answers) as base:
        assert noticed("gcp", base) == "notice: gcp takes this machine back\n"


def test_the_command_runs_when_azure_announces_an_end_of_this_machine() -> None:
    events = [
        EVENT % ("Reboot", "mine"),
        EVENT % ("Preempt", "another"),
        '{"Events": []}',
        EVENT % ("Preempt", "mine"),
    ]

    def answers(_: str, path: str, number: int) -> tuple[int, str]:
        return 200, "mine" if path == NAME else events[min(number, len(events)) - 1]

    with metadata(answers) as base:
        assert noticed("azure", base) == "notice: azure takes this machine back\n"


def test_a_metadata_service_that_fails_is_asked_again_and_named_once() -> None:
    def answers(_: str, __: str, number: int) -> tuple[int, str]:
        return (503, "") if number < QUESTIONS else (200, "TRUE")

    with metadata(answers) as base:
        lines = noticed("gcp", base).splitlines()
    assert len(lines) == 2 and "503" in lines[0]


def test_user_data_has_the_program_and_units_that_systemd_accepts(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    text = (FOLDER / "user-data.yaml").read_text()
    assert text.startswith("#cloud-config\n")
    data = yaml.safe_load(text)
    assert data.keys() == {"users", "write_files", "runcmd"}
    files = {one["path"]: one["content"] for one in data["write_files"]}
    assert files["/opt/pccl/notice.py"] == NOTICE.read_text()
    assert data["write_files"][0]["permissions"] == "0600"  # the secret
    units = {Path(path).name: text for path, text in files.items() if path.endswith(".service")}
    (enabled,) = [command[3:] for command in data["runcmd"] if "enable" in command]
    assert {f"{name}.service" for name in enabled} == units.keys()
    (user,) = [one for one in data["users"] if one != "default"]
    assert f"User={user['name']}\n" in units["pccl-peer.service"]
    assert f"WorkingDirectory={user['homedir']}\n" in units["pccl-peer.service"]
    read = configparser.ConfigParser(delimiters="=", comment_prefixes="#", strict=False)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read_string(units["pccl-notice.service"])
    words = read["Service"]["ExecStart"].split()
    assert words[1] in files and words[2] in ("aws", "gcp", "azure")
    assert f"{words[-1]}.service" in units
    systemd = shutil.which("systemd-analyze")
    if systemd is None:
        pytest.skip("no systemd-analyze")
    for name, unit in units.items():
        path = tmp_path / name
        program = unit.partition("ExecStart=")[2].split()[0]
        path.write_text(unit.replace(program, sys.executable))  # the program must exist
    done = subprocess.run(
        [systemd, "verify", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        timeout=60,
    )
    about_them = [line for line in done.stderr.splitlines() if "pccl-" in line]
    assert done.returncode == 0 and not about_them, done.stderr


def test_the_program_needs_nothing_but_python() -> None:
    tree = ast.parse(NOTICE.read_text())
    imported = {
        alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported and imported <= sys.stdlib_module_names
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))
