"""Draws the mermaid blocks of the pages as SVG while mkdocs builds the site.

GitHub draws such blocks itself; the site loads no script. This hook reads the part of the language
that the pages use: `stateDiagram-v2` and `sequenceDiagram`. Any other line is an error. A comment
places the states: `%% at name column row, name column row`.
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

LETTER = 6.4  # mean width of a letter, in pixels
LINE = 16  # height of a line of text
COLUMNS = 40  # letters in a line of a label
BOX_WIDTH, BOX_HEIGHT = 110, 34
GRID_X, GRID_Y = 150, 90

STYLE = (
    "font: 12px sans-serif; max-width: 100%; height: auto; background: #fcfcfc; "
    "border: 1px solid #e1e4e5"
)
MARKERS = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#444"/></marker></defs>'
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return BLOCK.sub(lambda block: draw(block[1]), markdown)


def draw(text: str) -> str:
    kind, *lines = [line.strip() for line in text.strip().splitlines()]
    if kind == "stateDiagram-v2":
        return draw_states(lines)
    if kind == "sequenceDiagram":
        return draw_sequence(lines)
    raise ValueError(f"tools/diagrams.py does not draw {kind}")


def svg(width: float, height: float, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    body = "".join([MARKERS, *parts])
    return f'<div><svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">{body}</svg></div>'


def label(x: float, y: float, lines: list[str], anchor: str = "middle") -> str:
    rows = "".join(
        f'<tspan x="{x:.1f}" y="{y + i * LINE:.1f}">{escape(line)}</tspan>'
        for i, line in enumerate(lines)
    )
    halo = 'paint-order="stroke" stroke="#fcfcfc" stroke-width="3"'
    return f'<text text-anchor="{anchor}" fill="#222" {halo}>{rows}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, radius: int) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
        f'fill="{fill}" stroke="#888"/>'
    )


# ---- states


def draw_states(lines: list[str]) -> str:
    """Boxes on a grid, numbered arrows between them, and what each number means."""
    places: dict[str, tuple[float, float]] = {}
    changes: list[tuple[str, str, str]] = []
    for line in lines:
        if line.startswith("%% at "):
            for name, column, row in re.findall(r"(\w+) (\d+) (\d+)", line[6:]):
                places[name] = (90 + int(column) * GRID_X, 40 + int(row) * GRID_Y)
        elif found := STATE_CHANGE.fullmatch(line):
            changes.append((found[1], found[2], found[3]))
        else:
            raise ValueError(f"tools/diagrams.py: no change of a state: {line}")
    parts = [
        arrow(places[start], places[end], number, (end, start) in {c[:2] for c in changes})
        for number, (start, end, _) in enumerate(changes, 1)
    ]
    for name, (x, y) in places.items():
        parts.append(
            box(x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2, BOX_WIDTH, BOX_HEIGHT, "#e8f0fa", 8)
        )
        parts.append(label(x, y + 4, [name]))
    width = max(x for x, _ in places.values()) + 90
    height = max(y for _, y in places.values()) + 40
    causes = "".join(
        f"<li><code>{start}</code> → <code>{end}</code>: {escape(cause)}</li>"
        for start, end, cause in changes
    )
    return f"{svg(width, height, parts)}\n\n<ol>{causes}</ol>"


def arrow(start: tuple[float, float], end: tuple[float, float], number: int, both: bool) -> str:
    """A line between two boxes, with its number; beside the middle if another one comes back."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx**2 + dy**2) ** 0.5
    shift = 9 if both else 0
    ox, oy = -dy / length * shift, dx / length * shift
    # Where the line leaves the box of its start, and where it meets that of its end.
    out, into = (
        min(
            ((size / 2 + 2) - side * (o if d > 0 else -o)) / abs(d)
            for d, o, size in ((dx, ox, BOX_WIDTH), (dy, oy, BOX_HEIGHT))
            if d
        )
        for side in (1, -1)
    )
    x1, y1 = start[0] + dx * out + ox, start[1] + dy * out + oy
    x2, y2 = end[0] - dx * into + ox, end[1] - dy * into + oy
    at = 0.42 if both else 0.5
    x, y = x1 + (x2 - x1) * at, y1 + (y2 - y1) * at
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#444" '
        f'marker-end="url(#arrow)"/><circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="#fff" '
        f'stroke="#888"/>' + label(x, y + 4, [str(number)])
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
            parts.append(box((x1 + x2 - width) / 2, y, width, height + 8, "#fff8dc", 0))
            parts.append(label((x1 + x2) / 2, y + LINE, text))
            right = max(right, (x1 + x2 + width) / 2 + 12)
            y += height + 22
        elif start == end:
            parts.append(label(x1 + 34, y + LINE, text, "start"))
            right = max(right, x1 + 44 + LETTER * max(map(len, text)))
            parts.append(
                f'<path d="M{x1:.1f},{y + 6:.1f} h26 v{height:.1f} h-24" fill="none" stroke="#444" '
                f'marker-end="url(#arrow)"/>'
            )
            y += height + 20
        else:
            parts.append(label((x1 + x2) / 2, y + 12, text))
            y += height + 2
            to = columns[end] - (6 if columns[end] > columns[start] else -6) * (kind == "--x")
            end_mark = 'stroke-dasharray="5 4"' if kind == "--x" else 'marker-end="url(#arrow)"'
            parts.append(
                f'<line x1="{columns[start]:.1f}" y1="{y:.1f}" x2="{to:.1f}" y2="{y:.1f}" '
                f'stroke="#444" {end_mark}/>'
            )
            if kind == "--x":
                parts.append(
                    f'<path d="M{to - 5:.1f},{y - 5:.1f} l10,10 m0,-10 l-10,10" stroke="#a00"/>'
                )
            y += 14
    heads = []
    for name, title in names.items():
        x, width = columns[name], max(BOX_WIDTH, LETTER * len(title) + 20)
        heads.append(f'<line x1="{x}" y1="44" x2="{x}" y2="{y:.1f}" stroke="#bbb"/>')
        heads.append(box(x - width / 2, 10, width, BOX_HEIGHT, "#e8f0fa", 4))
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
