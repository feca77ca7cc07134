"""Headless Chromium for tests of pages, driven over a pipe with its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def program() -> str | None:
    """The path of a Chromium, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab. Texts of its console and of exceptions are collected."""

    def __init__(self, to: int, back: int) -> None:
        self._to = os.fdopen(to, "wb", buffering=0)
        self._back = os.fdopen(back, "rb")
        self._number = 0
        self._session = ""
        self._rest = b""
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for room in ("Page", "Runtime", "Log"):
            self.call(f"{room}.enable")

    def close(self) -> None:
        self._to.close()
        self._back.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol, and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._back.fileno(), 1 << 16)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    def open(self, url: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Loads a page into a window of that size, with that color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 60.0) -> Any:
        """Returns its value as soon as that is true."""
        deadline = time.monotonic() + timeout
        while not (value := self.value(expression)):
            shown = self.value("document.body ? document.body.innerText.slice(0, 2000) : ''")
            assert time.monotonic() < deadline, f"never {expression}; the page says:\n{shown}"
            time.sleep(0.02)
        return value

    def text(self) -> str:
        """The text that a reader sees."""
        return str(self.value("document.body.innerText"))

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    def picture(self, path: Path, height: int | None = None) -> None:
        """Saves the whole page, or its top, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"]}
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browsing(path: str) -> Iterator[Page]:
    """A tab of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        ours_back, theirs_to = os.pipe()
        theirs_back, ours_to = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",  # which needs more rights than a container gives
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]
        # The browser reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$@" 3<&{theirs_back} 4>&{theirs_to}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", path, *options],
            pass_fds=[theirs_back, theirs_to],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_back)
        os.close(theirs_to)
        page = None
        try:
            page = Page(ours_to, ours_back)
            yield page
        finally:
            if page is not None:
                page.close()
            process.kill()
            process.wait()
