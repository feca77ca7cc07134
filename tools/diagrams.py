"""Draws the mermaid blocks of the pages as SVG while mkdocs builds the site.

GitHub draws such blocks itself; the site loads no script. This hook reads the part of the language
that the pages use: `stateDiagram-v2`, `sequenceDiagram`, `flowchart` and `gantt`. Any other line is
an error. A comment places the boxes of states and flowcharts: `%% at name column row, name column
row`. The colours are in docs/assets/site.css, for the light and the dark palette.
"""

import re
import textwrap
from html import escape
from typing import Any

BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STATE_CHANGE = re.compile(r"(\w+) --> (\w+): (.+)")
PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
MESSAGE = re.compile(r"(\w+)(->>|--x)(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+)(?:,(\w+))?: (.+)")
NODE = re.compile(r'(\w+)\["(.+)"\]')
EDGE = re.compile(r"(\w+) (-->|<-->|---|-\.->|<-\.->)(?:\|(.+)\|)? (\w+)")
SUBGRAPH = re.compile(r'subgraph (\w+)\["(.+)"\]')
TASK = re.compile(r"(.+?) ?:(?:(crit|active|done|milestone), ?)?([\d.]+), ?([\d.]+)")
PLACE = re.compile(r"(\w+) ([\d.]+) ([\d.]+)")

LETTER = 6.4  # mean width of a letter, in pixels
LINE = 16  # height of a line of text
COLUMNS = 40  # letters in a line of a label
BOX_WIDTH, BOX_HEIGHT = 110, 34
GRID_X, GRID_Y = 150, 90  # of states
CELL_X, CELL_Y = 190, 110  # of flowcharts: room for labels
BAR, CHART_WIDTH, NAMES_WIDTH = 24, 620, 100  # of a gantt chart
LEAST_WIDTH = 620  # of a wide diagram on a narrow page
Point = tuple[float, float]

MARKERS = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" class="head"/></marker></defs>'
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return BLOCK.sub(lambda block: draw(block[1]), markdown)


def draw(text: str) -> str:
    kind, *lines = [line.strip() for line in text.strip().splitlines()]
    if ";" in text:  # which ends a line for GitHub
        raise ValueError(f"tools/diagrams.py: a semicolon in a diagram: {text}")
    if kind == "stateDiagram-v2":
        return draw_states(lines)
    if kind == "sequenceDiagram":
        return draw_sequence(lines)
    if kind.startswith("flowchart "):
        return draw_flow(lines)
    if kind == "gantt":
        return draw_gantt(lines)
    raise ValueError(f"tools/diagrams.py does not draw {kind}")


def svg(width: float, height: float, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    # On a phone a wide diagram scrolls, so that its text stays readable.
    size += f' style="min-width: {min(width, LEAST_WIDTH):.0f}px"'
    body = "".join([MARKERS, *parts])
    return f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" {size}>{body}</svg></div>'


def label(x: float, y: float, lines: list[str], anchor: str = "middle", kind: str = "") -> str:
    """Lines of text. "free" text covers the lines that it crosses."""
    rows = "".join(
        f'<tspan x="{x:.1f}" y="{y + i * LINE:.1f}">{escape(line)}</tspan>'
        for i, line in enumerate(lines)
    )
    chosen = f' class="{kind}"' if kind else ""
    return f'<text text-anchor="{anchor}"{chosen}>{rows}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: int) -> str:
    """A rectangle. `kind` is its class in the style sheet."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'class="{kind}"/>'
    )


def places_in(line: str, left: float, top: float, step: Point) -> dict[str, Point]:
    """Where a comment `%% at ...` puts boxes."""
    return {
        name: (left + float(column) * step[0], top + float(row) * step[1])
        for name, column, row in PLACE.findall(line)
    }


def between(
    start: Point, end: Point, sizes: tuple[Point, Point], shift: float
) -> tuple[Point, Point]:
    """The part of the line between two boxes that is outside of both, `shift` off the middle."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx**2 + dy**2) ** 0.5
    ox, oy = -dy / length * shift, dx / length * shift
    out, into = (
        min(
            ((size[axis] / 2 + 2) - side * (o if d > 0 else -o)) / abs(d)
            for d, o, axis in ((dx, ox, 0), (dy, oy, 1))
            if d
        )
        for side, size in zip((1, -1), sizes, strict=True)
    )
    return (
        (start[0] + dx * out + ox, start[1] + dy * out + oy),
        (end[0] - dx * into + ox, end[1] - dy * into + oy),
    )


# ---- states


def draw_states(lines: list[str]) -> str:
    """Boxes on a grid, numbered arrows between them, and what each number means."""
    places: dict[str, Point] = {}
    changes: list[tuple[str, str, str]] = []
    for line in lines:
        if line.startswith("%% at "):
            places |= places_in(line[6:], 90, 40, (GRID_X, GRID_Y))
        elif found := STATE_CHANGE.fullmatch(line):
            changes.append((found[1], found[2], found[3]))
        else:
            raise ValueError(f"tools/diagrams.py: no change of a state: {line}")
    parts = [
        arrow(places[start], places[end], number, (end, start) in {c[:2] for c in changes})
        for number, (start, end, _) in enumerate(changes, 1)
    ]
    for name, (x, y) in places.items():
        parts.append(box(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, "box", 8))
        parts.append(label(x, y + 4, [name]))
    width = max(x for x, _ in places.values()) + 90
    height = max(y for _, y in places.values()) + 40
    causes = "".join(
        f"<li><code>{start}</code> → <code>{end}</code>: {escape(cause)}</li>"
        for start, end, cause in changes
    )
    return f"{svg(width, height, parts)}\n\n<ol>{causes}</ol>"


def arrow(start: Point, end: Point, number: int, both: bool) -> str:
    """A line between two states, with its number; beside the middle if another one comes back."""
    size = (BOX_WIDTH, BOX_HEIGHT)
    (x1, y1), (x2, y2) = between(start, end, (size, size), 9 if both else 0)
    at = 0.42 if both else 0.5
    x, y = x1 + (x2 - x1) * at, y1 + (y2 - y1) * at
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" marker-end="url(#arrow)"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9"/>' + label(x, y + 4, [str(number)])
    )


# ---- sequences


def draw_sequence(lines: list[str]) -> str:
    """A line for each participant, and what they say from top to bottom."""
    names: dict[str, str] = {}
    steps: list[tuple[str, str, str, list[str]]] = []  # kind, from, to, label
    for line in lines:
        if found := PARTICIPANT.fullmatch(line):
            names[found[1]] = found[2]
        elif found := MESSAGE.fullmatch(line):
            steps.append((found[2], found[1], found[3], textwrap.wrap(found[4], COLUMNS)))
        elif found := NOTE.fullmatch(line):
            wide = COLUMNS if not found[2] else 2 * COLUMNS
            steps.append(("note", found[1], found[2] or found[1], textwrap.wrap(found[3], wide)))
        else:
            raise ValueError(f"tools/diagrams.py: no step of a sequence: {line}")
    columns = place_columns(list(names), steps)
    parts: list[str] = []
    y, right = 60.0, max(columns.values()) + BOX_WIDTH
    for kind, start, end, text in steps:
        height = LINE * len(text)
        x1, x2 = sorted((columns[start], columns[end]))
        if kind == "note":
            width = max(x2 - x1, LETTER * max(map(len, text))) + 20
            parts.append(box((x1 + x2 - width) / 2, y, width, height + 8, "note", 0))
            parts.append(label((x1 + x2) / 2, y + LINE, text))
            right = max(right, (x1 + x2 + width) / 2 + 12)
            y += height + 22
        elif start == end:
            parts.append(label(x1 + 34, y + LINE, text, "start", "free"))
            right = max(right, x1 + 44 + LETTER * max(map(len, text)))
            parts.append(
                f'<path d="M{x1:.1f},{y + 6:.1f} h26 v{height:.1f} h-24" class="loop" '
                f'marker-end="url(#arrow)"/>'
            )
            y += height + 20
        else:
            parts.append(label((x1 + x2) / 2, y + 12, text, kind="free"))
            y += height + 2
            to = columns[end] - (6 if columns[end] > columns[start] else -6) * (kind == "--x")
            end_mark = 'stroke-dasharray="5 4"' if kind == "--x" else 'marker-end="url(#arrow)"'
            parts.append(
                f'<line x1="{columns[start]:.1f}" y1="{y:.1f}" x2="{to:.1f}" y2="{y:.1f}" '
                f"{end_mark}/>"
            )
            if kind == "--x":
                parts.append(
                    f'<path d="M{to - 5:.1f},{y - 5:.1f} l10,10 m0,-10 l-10,10" class="lost"/>'
                )
            y += 14
    heads = []
    for name, title in names.items():
        x, width = columns[name], max(BOX_WIDTH, LETTER * len(title) + 20)
        heads.append(f'<line x1="{x}" y1="44" x2="{x}" y2="{y:.1f}" class="life"/>')
        heads.append(box(x - width / 2, 10, width, BOX_HEIGHT, "box", 4))
        heads.append(label(x, 31, [title]))
    return svg(right, y + 12, heads + parts)


def place_columns(
    names: list[str], steps: list[tuple[str, str, str, list[str]]]
) -> dict[str, float]:
    """Where the participants stand: as far apart as the labels between them need."""
    gaps = [150.0] * (len(names) - 1)
    for kind, start, end, text in steps:
        first, last = sorted((names.index(start), names.index(end)))
        needed = LETTER * max(map(len, text)) + 24
        if first == last and kind != "note" and first < len(gaps):
            last, needed = first + 1, needed + 30
        missing = needed - sum(gaps[first:last])
        if last > first and missing > 0:
            for i in range(first, last):
                gaps[i] += missing / (last - first)
    notes = [
        LETTER * max(map(len, t)) for k, s, e, t in steps if k == "note" and s == e == names[0]
    ]
    left = max([BOX_WIDTH / 2 + 10, *(width / 2 + 16 for width in notes)])
    return {name: round(left + sum(gaps[:i]), 1) for i, name in enumerate(names)}


# ---- flowcharts


def draw_flow(lines: list[str]) -> str:
    """Boxes on a grid, frames around some of them, and labelled lines between them."""
    places: dict[str, Point] = {}
    texts: dict[str, list[str]] = {}
    frames: list[tuple[str, list[str]]] = []  # title, nodes
    edges: list[tuple[str, str, str, str]] = []  # from, kind, label, to
    inside: list[str] | None = None
    for line in lines:
        if line.startswith("%% at "):
            places |= places_in(line[6:], 0, 0, (CELL_X, CELL_Y))
        elif found := SUBGRAPH.fullmatch(line):
            inside = []
            frames.append((found[2], inside))
        elif line == "end":
            inside = None
        elif found := NODE.fullmatch(line):
            texts[found[1]] = found[2].split("<br/>")
            if inside is not None:
                inside.append(found[1])
        elif found := EDGE.fullmatch(line):
            edges.append((found[1], found[2], found[3] or "", found[4]))
        else:
            raise ValueError(f"tools/diagrams.py: no part of a flowchart: {line}")
    sizes = {
        name: (max(BOX_WIDTH, LETTER * max(map(len, rows)) + 20), LINE * len(rows) + 18.0)
        for name, rows in texts.items()
    }
    left = min(places[name][0] - sizes[name][0] / 2 for name in texts) - 26
    top = min(places[name][1] - sizes[name][1] / 2 for name in texts) - (24 if frames else 12)
    places = {name: (x - left, y - top) for name, (x, y) in places.items()}
    parts = [
        frame(title, [(places[name], sizes[name]) for name in names]) for title, names in frames
    ]
    for start, kind, text, end in edges:
        (x1, y1), (x2, y2) = between(places[start], places[end], (sizes[start], sizes[end]), 0)
        marks = ' marker-end="url(#arrow)"' if kind != "---" else ""
        marks += ' marker-start="url(#arrow)"' if kind.startswith("<") else ""
        marks += ' stroke-dasharray="5 4"' if "." in kind else ""
        parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{marks}/>')
        if text:
            rows = text.split("<br/>")
            flat = abs(y2 - y1) < abs(x2 - x1) / 4  # the text goes above the line
            middle = (y1 + y2) / 2 + (-8 if flat else 4) - LINE * (len(rows) - 1) / (1 + (not flat))
            parts.append(label((x1 + x2) / 2, middle, rows, kind="free"))
    for name, rows in texts.items():
        (x, y), (width, height) = places[name], sizes[name]
        parts.append(box(x - width / 2, y - height / 2, width, height, "box", 6))
        parts.append(label(x, y + 4 - LINE * (len(rows) - 1) / 2, rows))
    right = max(places[name][0] + sizes[name][0] / 2 for name in texts) + 26
    bottom = max(places[name][1] + sizes[name][1] / 2 for name in texts) + (38 if frames else 12)
    return svg(right, bottom, parts)


def frame(title: str, boxes: list[tuple[Point, Point]]) -> str:
    left = min(x - width / 2 for (x, _), (width, _) in boxes) - 12
    right = max(x + width / 2 for (x, _), (width, _) in boxes) + 12
    top = min(y - height / 2 for (_, y), (_, height) in boxes) - 12
    bottom = max(y + height / 2 for (_, y), (_, height) in boxes) + 26
    around = box(left, top, right - left, bottom - top, "frame", 8)
    return around + label(left + 10, bottom - 8, [title], "start")


# ---- timelines


def draw_gantt(lines: list[str]) -> str:
    """A band for each section, with the bars that overlap in time below each other."""
    bands: list[tuple[str, list[tuple[str, str, float, float]]]] = []
    for line in lines:
        if line.startswith(("dateFormat ", "axisFormat ")):
            continue
        if line.startswith("section "):
            bands.append((line[8:], []))
        elif found := TASK.fullmatch(line):
            bands[-1][1].append((found[1], found[2] or "plain", float(found[3]), float(found[4])))
        else:
            raise ValueError(f"tools/diagrams.py: no part of a timeline: {line}")
    scale = CHART_WIDTH / max(end for _, tasks in bands for *_, end in tasks)
    parts: list[str] = []
    y = 12.0
    for title, tasks in bands:
        lanes: list[float] = []  # where the last bar of each ends
        moments: list[tuple[str, float]] = []
        parts.append(label(12, y + 16, [title], "start"))
        for text, kind, start, end in tasks:
            x, width = NAMES_WIDTH + start * scale, (end - start) * scale
            if kind == "milestone":
                moments.append((text, x))
                continue
            lane = next((i for i, busy in enumerate(lanes) if busy <= start), len(lanes))
            lanes[lane : lane + 1] = [end]
            at = y + lane * (BAR + 4)
            parts.append(box(x + 1, at, width - 2, BAR, kind, 3))
            parts.append(label(x + width / 2, at + 16, [text]))
        height = len(lanes) * (BAR + 4)
        for text, x in moments:
            parts.append(f'<path d="M{x:.1f},{y - 3:.1f} v{height + 4}" class="milestone"/>')
            room = x + LETTER * len(text) / 2 < NAMES_WIDTH + CHART_WIDTH
            parts.append(label(x, y + height + 13, [text], "middle" if room else "end", "free"))
        y += height + (26 if moments else 14)
        parts.append(
            f'<line x1="12" y1="{y - 8:.1f}" x2="{NAMES_WIDTH + CHART_WIDTH}" y2="{y - 8:.1f}" class="life"/>'
        )
    parts.append(label(NAMES_WIDTH + CHART_WIDTH, y + 10, ["time →"], "end"))
    return svg(NAMES_WIDTH + CHART_WIDTH + 12, y + 20, parts)
