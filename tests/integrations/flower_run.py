"""Runs Flower with two silos of three and two machines, in a network of its own:

    unshare -n python flower_run.py FOLDER EXAMPLE

FOLDER gets the app and the logs. In the second round a machine of the first silo is killed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LIMIT = 120  # seconds
SUPERLINK = "127.0.0.1:9091"
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "silo"
version = "1.0.0"
description = "Silos that have several machines"
license = "MIT"
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "pccl"
[tool.flwr.app.components]
serverapp = "silo.server:app"
clientapp = "silo.client:app"
[tool.flwr.app.config]
"""
CONNECTION = f"""
[superlink]
default = "here"
[superlink.here]
address = "{SUPERLINK}"
insecure = true
"""
SERVER = Path(__file__).with_name("flower_server.py")


class Started:
    """A process that writes to a log."""

    def __init__(self, log: Path, command: list[str], env: Mapping[str, str]) -> None:
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent
            )

    def hear(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not re.search(pattern, self._log.read_text(errors="replace")):
            assert self.process.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def main() -> None:
    folder, example = map(Path, sys.argv[1:])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    app, home, here = folder / "app", folder / "home", Path(sys.executable).parent
    (app / "silo").mkdir(parents=True)
    home.mkdir()
    (app / "pyproject.toml").write_text(PROJECT)
    (home / "config.toml").write_text(CONNECTION)
    (app / "silo" / "__init__.py").touch()
    shutil.copy(SERVER, app / "silo" / "server.py")
    shutil.copy(example, app / "silo" / "client.py")
    env = dict(os.environ, FLWR_HOME=str(home), PCCL_BIND="127.0.0.1", OMP_NUM_THREADS="1")
    env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    env["PATH"] = f"{here}{os.pathsep}{env['PATH']}"
    started: list[Started] = []

    def start(name: str, *command: str, **more: str) -> Started:
        started.append(Started(folder / f"{name}.log", list(command), env | more))
        return started[-1]

    try:
        link = ["--insecure", "--disable-runtime-dependency-installation"]
        link += ["--host", "127.0.0.1", "--port", "9091"]
        superlink = start("superlink", "flower-superlink", *link)
        helpers = []
        for silo, machines in ((1, 3), (2, 2)):
            serve = ["-m", "pccl", "master", "--insecure", "--listen", "127.0.0.1:0"]
            master = start(f"master{silo}", sys.executable, *serve)
            master.hear(r"listening on \S+\n")
            address = re.findall(r"listening on (\S+)", master.said())[0]
            for number in range(1, machines):
                name = {"PCCL_MASTER": address, "PCCL_NAME": f"{silo}{number}"}
                helper = start(f"helper{silo}{number}", sys.executable, str(example), **name)
                helpers.append(helper)
            master.hear(f"{machines - 1} members" if machines > 2 else "started")
            superlink.hear("running on http")
            node = ["--insecure", "--superlink", SUPERLINK, "--host", "127.0.0.1"]
            node += ["--port", str(9100 + silo)]
            start(f"supernode{silo}", "flower-supernode", *node, PCCL_MASTER=address)
        run = start("run", "flwr", "run", str(app), "here", "--stream")
        run.hear(r"ROUND 2/4")
        helpers[0].process.kill()
        run.hear(r"ends with .*\n")
        print(run.said())
    finally:
        for one in started:
            one.process.terminate()
        for one in started:
            one.process.wait()


if __name__ == "__main__":
    main()
