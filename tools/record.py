"""Records examples/kill_and_join.py in two terminals, and draws the recording as an animated SVG.

    python tools/record.py docs/images/run.svg

The two terminals are shells on pseudo-terminals. This program types what a user would type: it
starts four peers, kills one by its pid, and starts another one with the line that `pccl run`
printed. Everything else on the picture is what the programs wrote, when they wrote it. Pauses in
which nothing changes are cut to PAUSE_SECONDS, and a run that takes longer than LOOP_SECONDS is
played faster. The picture says both.

The picture needs no script: CSS moves a strip of screens, one screen at a time. Readers who ask for
less motion see the last screen. Needs `pyte`, and `pccl` in the environment of this Python.
"""

from __future__ import annotations

import argparse
import codecs
import datetime
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import pyte

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 92
ROWS = {"run": 16, "other": 6}  # terminal -> its height
TITLES = {"run": "terminal 1", "other": "terminal 2"}
FRAME_SECONDS = 0.1  # screens that follow faster are drawn as one
PAUSE_SECONDS = 0.8  # longer pauses are cut to this
END_SECONDS = 5.0  # the last screen stays for so long
LOOP_SECONDS = 24.0  # a longer run is played faster
KEY_SECONDS = 0.03
PATIENCE_SECONDS = 120.0

CELL, LINE, SIZE, MARGIN, BAR = 8.4, 18, 14, 14, 26  # pixels
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
COLORS = {
    "default": "#d0d7de", "black": "#6e7681", "red": "#ff7b72", "green": "#56d364",
    "brown": "#e3b341", "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#56d4dd",
    "white": "#f0f6fc", "brightblack": "#8b949e", "brightred": "#ffa198",
    "brightgreen": "#7ee787", "brightbrown": "#f2cc60", "brightblue": "#a5d6ff",
    "brightmagenta": "#e2c5ff", "brightcyan": "#76e3ea", "brightwhite": "#ffffff",
}  # fmt: skip

Style = tuple[str, bool]  # color, bold
Line = tuple[tuple[int, str, Style], ...]  # column, text, style


@dataclass(frozen=True)
class Screen:
    lines: tuple[Line, ...]
    cursor: tuple[int, int] | None  # column, row


class Terminal:
    """A shell on a pseudo-terminal, and what its screen shows."""

    def __init__(self, rows: int, environment: dict[str, str]) -> None:
        self.text = ""  # everything that was written, without colors
        self._screen = pyte.Screen(COLUMNS, rows)
        self._stream = pyte.Stream(self._screen)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.file, inside = pty.openpty()
        size = struct.pack("HHHH", rows, COLUMNS, 0, 0)
        fcntl.ioctl(inside, termios.TIOCSWINSZ, size)
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            cwd=ROOT,
            env=environment,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(inside)

    def read(self) -> None:
        with suppress(OSError):  # EIO: the shell has ended
            text = self._decode(os.read(self.file, 1 << 16))
            self._stream.feed(text)
            plain = re.sub(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])", "", text)
            self.text += plain.replace("\r", "")

    def write(self, text: str) -> None:
        os.write(self.file, text.encode())

    def screen(self) -> Screen:
        lines = []
        for row in range(self._screen.lines):
            runs: list[tuple[int, str, Style]] = []
            cells = self._screen.buffer[row]
            for column in range(COLUMNS):
                cell = cells[column]
                style = (cell.fg, cell.bold)
                if runs and runs[-1][2] == style:
                    runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, style)
                else:
                    runs.append((column, cell.data, style))
            shown = [(c + len(t) - len(t.lstrip()), t.strip(), s) for c, t, s in runs]
            lines.append(tuple(run for run in shown if run[1]))
        cursor = self._screen.cursor
        return Screen(tuple(lines), None if cursor.hidden else (cursor.x, cursor.y))

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGHUP)
        os.close(self.file)
        self.process.wait(10)


@dataclass
class Recording:
    """Screens and captions with the seconds at which they began."""

    screens: dict[str, list[tuple[float, Screen]]] = field(default_factory=dict)
    captions: list[tuple[float, str]] = field(default_factory=list)
    seconds: float = 0.0
    cut: float = 0.0  # seconds of pauses that were taken out
    speed: float = 1.0  # how many times as fast as the run


class Recorder:
    """Two terminals and a user who types."""

    def __init__(self) -> None:
        environment = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "FORCE_COLOR": "1",  # the peers write to pipes
            "PS1": "$ ",
            "INPUTRC": "/dev/null",
        }
        self.terminals = {name: Terminal(rows, environment) for name, rows in ROWS.items()}
        self.recording = Recording(screens={name: [] for name in ROWS})
        self._began: float | None = None

    def play(self, user: Callable[[Recorder], Iterator[None]]) -> Recording:
        """Runs until the user has finished. The user yields whenever the terminals may go on."""
        for terminal in self.terminals.values():
            self._until(lambda terminal=terminal: "$ " in terminal.text)
        self._began = time.monotonic()
        for _ in user(self):
            self._turn()
        self.recording.seconds = time.monotonic() - self._began
        return self.recording

    def say(self, text: str) -> None:
        assert self._began is not None
        self.recording.captions.append((time.monotonic() - self._began, text))

    def wait(self, terminal: str, pattern: str) -> Iterator[None]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.terminals[terminal].text):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern!r} in:\n{self.terminals[terminal].text}")
            yield

    def pause(self, seconds: float) -> Iterator[None]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            yield

    def type(self, terminal: str, text: str) -> Iterator[None]:
        """Key by key, and then the return key."""
        for key in text:
            self.terminals[terminal].write(key)
            yield from self.pause(KEY_SECONDS)
        yield from self.pause(0.4)
        self.terminals[terminal].write("\r")
        yield

    def paste(self, terminal: str, text: str) -> Iterator[None]:
        self.terminals[terminal].write(text)
        yield from self.pause(0.8)
        self.terminals[terminal].write("\r")
        yield

    def close(self) -> None:
        for terminal in self.terminals.values():
            terminal.close()

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("no shell")
            self._turn()

    def _turn(self) -> None:
        by_file = {terminal.file: terminal for terminal in self.terminals.values()}
        ready, _, _ = select.select(list(by_file), [], [], KEY_SECONDS / 3)
        for file in ready:
            by_file[file].read()
        if self._began is None:
            return
        now = time.monotonic() - self._began
        for name, terminal in self.terminals.items():
            screens = self.recording.screens[name]
            if screens and now < screens[-1][0] + FRAME_SECONDS:
                continue
            screen = terminal.screen()
            if not screens or screens[-1][1] != screen:
                screens.append((now, screen))


def shortened(recording: Recording) -> Recording:
    """The same with pauses cut to PAUSE_SECONDS, in at most LOOP_SECONDS, and its end held."""
    tracks = [*recording.screens.values(), recording.captions]
    times = sorted({at for track in tracks for at, _ in track})
    moved, cut = {}, 0.0
    for before, at in zip([0.0, *times], times, strict=False):
        cut += max(0.0, at - before - PAUSE_SECONDS)
        moved[at] = at - cut
    last = moved[times[-1]]
    speed = max(1.0, last / (LOOP_SECONDS - END_SECONDS))
    return Recording(
        {
            name: [(moved[at] / speed, screen) for at, screen in track]
            for name, track in recording.screens.items()
        },
        [(moved[at] / speed, text) for at, text in recording.captions],
        last / speed + END_SECONDS,
        cut,
        speed,
    )


# ---- drawing
# ------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """The SVG text of a recording."""

    def __init__(self, recording: Recording, note: str) -> None:
        self._recording = recording
        self._note = note
        self._lines: dict[Line, str] = {}  # drawn line -> its id
        self._styles: dict[Style, str] = {}
        self._css: list[str] = []
        self._body: list[str] = []
        self._width = 2 * MARGIN + COLUMNS * CELL

    def draw(self) -> str:
        top = 0.0
        for name, screens in self._recording.screens.items():
            top = self._terminal(name, screens, top)
        height = self._captions(top)
        lines = [self._line(line, name) for line, name in self._lines.items()]
        last = self._recording.captions[-1][1]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(self._width)} '
                f'{number(height)}" width="{number(self._width)}" height="{number(height)}" role="img">',
                "<title>Four peers train, one is killed, another joins: identical weights</title>",
                f"<desc>{escape(last)}. {escape(self._note)}</desc>",
                f"<style>text{{font:{SIZE}px {FONTS};white-space:pre;fill:{COLORS['default']}}}",
                ".s text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}",
                *self._css,
                *(f".{name}{{{self._fill(style)}}}" for style, name in self._styles.items()),
                "@media(prefers-reduced-motion:reduce){*{animation:none!important}}</style>",
                "<defs>",
                f'<rect id="k" width="{CELL}" height="{LINE - 2}" fill="#8b949e"/>',
                *lines,
                "</defs>",
                '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
                *self._body,
                "</svg>\n",
            ]
        )

    @staticmethod
    def _fill(style: Style) -> str:
        color, bold = style
        fill = COLORS.get(color) or f"#{color}"
        return f"fill:{fill}" + (";font-weight:bold" if bold else "")

    def _line(self, line: Line, name: str) -> str:
        spans = []
        for column, text, style in line:
            known = self._styles.setdefault(style, f"f{len(self._styles)}")
            kind = "" if style == ("default", False) else f' class="{known}"'
            length = f' textLength="{number(len(text) * CELL)}" lengthAdjust="spacingAndGlyphs"'
            place = f'x="{number(column * CELL)}"'
            spans.append(f"<tspan {place}{kind}{length}>{escape(text, quote=False)}</tspan>")
        return f'<text id="{name}">{"".join(spans)}</text>'

    def _strip(self, name: str, times: list[float], height: float) -> str:
        """Shows one of `times` parts of that height at a time; the last one without animation."""
        total = self._recording.seconds
        steps = [
            f"{number(100 * at / total)}%{{transform:translateY({number(-part * height)}px)}}"
            for part, at in enumerate(times)
        ]
        steps[0] = "0%" + steps[0].partition("%")[2]
        end = number(-(len(times) - 1) * height)
        steps.append(f"100%{{transform:translateY({end}px)}}")
        self._css.append(f"@keyframes {name}{{{''.join(steps)}}}")
        how = f"animation:{name} {number(total)}s step-end infinite"
        self._css.append(f"#{name}{{transform:translateY({end}px);{how}}}")
        return f'<g id="{name}">'

    def _terminal(self, name: str, screens: list[tuple[float, Screen]], top: float) -> float:
        height = ROWS[name] * LINE + 10.0
        self._body.append(
            f'<path d="M0 {number(top + BAR)}h{number(self._width)}" stroke="#30363d"/>'
        )
        for place, color in enumerate(("#ff5f57", "#febc2e", "#28c840")):
            x, y = MARGIN + 6 + 18 * place, number(top + BAR / 2)
            self._body.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{color}"/>')
        self._body.append(
            f'<g class="s"><text x="{number(self._width / 2)}" y="{number(top + 18)}" '
            f'text-anchor="middle" style="font-size:12px;fill:#8b949e">{TITLES[name]}</text></g>'
        )
        inner = f'<svg x="{MARGIN}" y="{number(top + BAR + 6)}" width="{number(COLUMNS * CELL)}" '
        self._body.append(f'{inner}height="{number(height)}">')
        self._body.append(self._strip(f"t{name}", [at for at, _ in screens], height))
        for part, (_, screen) in enumerate(screens):
            base = part * height
            if screen.cursor:
                x, y = screen.cursor[0] * CELL, base + screen.cursor[1] * LINE
                self._body.append(f'<use href="#k" x="{number(x)}" y="{number(y)}"/>')
            for row, line in enumerate(screen.lines):
                if line:
                    known = self._lines.setdefault(line, f"l{len(self._lines)}")
                    y = base + row * LINE + SIZE
                    self._body.append(f'<use href="#{known}" y="{number(y)}"/>')
        self._body.append("</g></svg>")
        return top + BAR + height + 6

    def _captions(self, top: float) -> float:
        """The bar below: where the story is, what is shown, and how far the loop is."""
        width, height = number(self._width), 34
        self._css.append(
            f"@keyframes bar{{from{{transform:scaleX(0)}}}}"
            f"#bar{{animation:bar {number(self._recording.seconds)}s linear infinite}}"
        )
        self._body.append(f'<path d="M0 {number(top)}h{width}" stroke="#30363d"/>')
        self._body.append(
            f'<rect id="bar" y="{number(top)}" width="{width}" height="2" fill="#56d364"/>'
        )
        self._body.append(f'<svg y="{number(top)}" width="{width}" height="{height}" class="s">')
        self._body.append(self._strip("say", [at for at, _ in self._recording.captions], height))
        for part, (_, text) in enumerate(self._recording.captions):
            y = part * height + 22
            style = "font-size:15px;font-weight:600;fill:#f0f6fc"
            self._body.append(f'<text x="{MARGIN}" y="{y}" style="{style}">{escape(text)}</text>')
        self._body.append("</g></svg>")
        self._body.append(
            f'<g class="s"><text x="{MARGIN}" y="{number(top + height + 12)}" '
            f'style="font-size:11px;fill:#8b949e">{escape(self._note)}</text></g>'
        )
        return top + height + 24


# ---- the story
# ------------------------------------------------------------------------------


def story(steps: int) -> Callable[[Recorder], Iterator[None]]:
    def user(recorder: Recorder) -> Iterator[None]:
        program = f"python examples/kill_and_join.py {steps}"
        every = steps // 25
        recorder.say("Four peers train on handwritten digits.")
        yield from recorder.pause(0.3)
        yield from recorder.type("run", f"pccl run -n 4 --elastic --show-join -- {program}")
        yield from recorder.wait("run", rf"step +{5 * every} ")
        seen = recorder.terminals["run"].text
        victim = re.search(r"\[1\] pid (\d+)", seen)
        join = re.search(r"to join: (.*?\.py \d+)", seen.replace("\n", ""))
        assert victim and join, seen
        recorder.say("One of them is killed.")
        yield from recorder.type("other", f"kill -9 {victim[1]}")
        yield from recorder.wait("run", r"3 peers")
        recorder.say("The three others go on. Nothing is restarted.")
        yield from recorder.wait("run", rf"step +{11 * every} ")
        recorder.say("Another one is started, with the line from the first terminal.")
        yield from recorder.paste("other", join[1])
        yield from recorder.wait("other", r"received \d+ kB of state")
        recorder.say("It receives the state from the others and trains with them.")
        yield from recorder.wait("other", r"weights sha256 \w+")
        yield from recorder.wait("run", r"(?s)(weights sha256 \w+.*){3}\$ $")
        recorder.say("All four end with the same weights, bit for bit.")
        yield from recorder.pause(0.5)

    return user


def checked(recorder: Recorder) -> None:
    """Refuses a recording that does not show what the captions say."""
    ends = [re.findall(r"sha256 (\w+)", t.text) for t in recorder.terminals.values()]
    if [len(found) for found in ends] != [3, 1] or len({sum(ends, [])[0], *sum(ends, [])}) != 1:
        raise SystemExit(f"the peers did not end as they should: {ends}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("svg", type=Path, help="where the picture goes")
    parser.add_argument("--steps", type=int, default=3000, help="of the program (%(default)s)")
    options = parser.parse_args()
    recorder = Recorder()
    try:
        recording = recorder.play(story(options.steps))
        checked(recorder)
    finally:
        recorder.close()
    shown = shortened(recording)
    note = f"A real run, recorded on {datetime.date.today()} on {os.cpu_count()} cores."
    if shown.speed > 1:
        note += f" Played {shown.speed:.1f} times as fast."
    if shown.cut >= 0.5:
        note += (
            f" Pauses are cut to {PAUSE_SECONDS:g} s: {shown.cut:.0f} of {recording.seconds:.0f} s"
            " were taken out."
        )
    options.svg.write_text(Drawing(shown, note).draw())
    screens = sum(map(len, shown.screens.values()))
    size = options.svg.stat().st_size
    print(f"{options.svg}: {size / 1e3:.0f} kB, {screens} screens, {shown.seconds:.1f} s. {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
