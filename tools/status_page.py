"""Takes the picture of the status page for the docs: `python tools/status_page.py`.

The page is the real one, in a headless Chromium. The run is the example of tests/status.json, with
ten minutes before it that are made up. Needs Chromium and Pillow (of matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from pccl.tools import web

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "status_page.png"
WIDTH = 1200
COLORS = 96  # of the picture's palette


def past(status: dict[str, object], seconds: int = 600) -> list[web.Sample]:
    """Points of the charts until now: members come and go, and the last call waits."""
    noise = random.Random(5)
    now, operations, points = time.monotonic(), 0.0, []
    for ago in range(seconds, 0, -1):
        members = 4 if 420 < ago < 480 else 5
        speed = 0.0 if ago < 14 else 0.7 + 0.06 * math.sin(ago / 31) + noise.uniform(-0.03, 0.03)
        operations += speed
        rate = speed * members * 33554432
        points.append(web.Sample(now - ago, members, round(operations), rate))
    return points


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--height", type=int, help="default: the whole page")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import browser

    status = json.loads((ROOT / "tests" / "status.json").read_text())
    program = browser.program()
    if program is None:
        print("needs Chromium", file=sys.stderr)
        return 1
    points = past(status)
    status["groups"][0]["operations"] = points[-1].operations
    for member in status["groups"][0]["members"]:
        member["reduced_bytes_per_s"] = 0.0
    with web.StatusServer(lambda: status, "0") as server, browser.browsing(program) as page:
        server._watch._samples.extendleft(reversed(points))
        page.open(server.url, options.width, scheme=options.scheme)
        page.wait_for("document.querySelectorAll('#group-0 .members tbody tr').length")
        with tempfile.TemporaryDirectory() as folder:
            shot = Path(folder) / "page.png"
            page.picture(shot, options.height)
            Image.open(shot).convert("RGB").quantize(COLORS).save(options.picture, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
