"""`pccl top`: a run, live."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from pccl.errors import PCCLError
from pccl.tools import screen, show
from pccl.tools.parsing import Misuse, add_master, reason_of, seconds
from pccl.tools.status import (
    BROKEN,
    HELD_SECONDS,
    Group,
    Member,
    Status,
    Unreadable,
    ask_any,
    duration,
    master_of,
    master_troubles,
    read,
)

__all__: list[str] = []

_EVENTS = 5
_OTHERS_SECONDS = 1.0  # for standbys, once the master that serves has answered
# Key -> what it sorts by, and the value; the greatest first, where `True`.
_ORDERS: dict[str, tuple[str, Callable[[Member], Any], bool]] = {
    "r": ("rank", lambda member: member.rank, False),
    "n": ("name", lambda member: member.name, False),
    "o": ("operations/s", lambda member: member.operations_per_s or 0.0, True),
    "b": ("bytes/s", lambda member: member.reduced_bytes_per_s or 0.0, True),
    "w": ("waiting time", lambda member: max((w.seconds for w in member.waits), default=0.0), True),
    "h": ("last heard", lambda member: member.heard_seconds, True),
}
_KEYS = [
    *((key, f"sort by {name}") for key, (name, _, _) in _ORDERS.items()),
    ("i", "invert the order"),
    ("g", "next group"),
    ("j, k", "scroll down and up; so do the arrows"),
    ("e", "events on and off"),
    ("?", "these keys on and off"),
    ("q", "quit"),
]
# A key: an escape sequence of the terminal's, or a character.
_KEY = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|.", re.DOTALL)
_ARROWS = {"\x1b[A": "k", "\x1b[B": "j", "\x1bOA": "k", "\x1bOB": "j"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `pccl top`."""
    add_master(parser)
    words = "between two looks at the run (default: %(default)s)"
    parser.add_argument(
        "--interval", type=seconds(0.5, 3600), default=1.0, metavar="SECONDS", help=words
    )


def run(options: argparse.Namespace) -> int:
    """The command. Returns 0 after the key q, and 130 after Ctrl-C.

    Raises:
        Misuse: The standard output is no terminal, or there is no master to ask.
    """
    master = master_of(options.master)
    console = screen.console(sys.stdout)
    if console is None:
        raise Misuse("needs a terminal (and rich); `pccl status` prints the same once, as text")
    from rich.live import Live

    watch = _Watch(master, options.interval)
    view = View(master)
    with ExitStack() as stack:
        stack.enter_context(_ends_by_signals())
        read_key = stack.enter_context(_keys())
        stack.callback(watch.stop)
        watch.start()
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        while True:
            view.status, view.failure = watch.latest()
            live.update(view.draw(console.height), refresh=True)
            for key in read_key(watch.wake):
                if key == "q":
                    return 0
                view.press(key)


class _Watch:
    """Asks the master on a thread of its own, again and again, also after failures."""

    def __init__(self, master: str, interval: float) -> None:
        self._master = master
        self._interval = interval
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._failure = ""
        self.wake, self._waker = os.pipe()  # readable when there is something new
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The thread may be inside a question; it ends after it."""
        self._stopped.set()

    def latest(self) -> tuple[Status | None, str]:
        """The last status, and why there is no newer one ("": it is new)."""
        with self._lock:
            return self._status, self._failure

    def _work(self) -> None:
        while not self._stopped.is_set():
            status, failure = None, ""
            try:
                status = read(ask_any(self._master, others=_OTHERS_SECONDS)[1])
            except PCCLError as error:
                failure = reason_of(error)
            except Unreadable as error:
                failure = f"cannot read its status: {error}"
            except Exception as error:
                failure = repr(error)  # the thread goes on: old numbers must not look new
            with self._lock:
                self._status, self._failure = status or self._status, failure
            try:
                os.write(self._waker, b"!")
            except BlockingIOError:
                pass  # it is awake
            self._stopped.wait(self._interval)


class View:
    """The screen: the last status, and what keys have chosen."""

    def __init__(self, master: str) -> None:
        self.master = master
        self.status: Status | None = None
        self.failure = ""
        self._order = "r"
        self._inverted = False
        self._number: int | None = None  # of the group; None: the first
        self._first = 0  # row
        self._events = True
        self._help = False

    def press(self, key: str) -> None:
        """Obeys a key; keys that mean nothing are ignored."""
        if key in _ORDERS:
            self._order, self._inverted, self._first = key, False, 0
        elif key == "i":
            self._inverted = not self._inverted
        elif key == "g" and self.status and self.status.groups:
            numbers = [group.group for group in self.status.groups]
            now = numbers.index(self._number) if self._number in numbers else 0
            self._number, self._first = numbers[(now + 1) % len(numbers)], 0
        elif key == "j":
            self._first += 1
        elif key == "k":
            self._first = max(0, self._first - 1)
        elif key == "e":
            self._events = not self._events
        elif key == "?":
            self._help = not self._help

    def group(self) -> Group | None:
        """The group that is shown."""
        if self.status is None or not self.status.groups:
            return None
        found = None if self._number is None else self.status.group(self._number)
        return found or self.status.groups[0]

    def members(self, group: Group) -> list[Member]:
        """The members in the chosen order; equal ones by rank."""
        _, value, falling = _ORDERS[self._order]
        ordered = sorted(group.members, key=lambda member: member.rank)
        return sorted(ordered, key=value, reverse=falling != self._inverted)

    def draw(self, height: int) -> Any:
        """The whole screen, for a terminal with so many lines."""
        from rich.console import Group as Lines
        from rich.text import Text

        top: list[Any] = [Text.assemble(("pccl top ", "bold cyan"), self.master)]
        if self.failure:
            top.append(Text(f"The master does not answer: {self.failure}.", style="bold red"))
            what = "The picture below is old. " if self.status else ""
            top.append(Text(f"{what}Trying again.", style="bold red"))
        if self.status is None:
            if not self.failure:
                top.append(Text("asking the master"))
            return Lines(*top, self._foot())
        top.append(_line(show.run_line(self.status)))
        if self.status.masters:
            top.append(_line(show.masters_line(self.status)))
        for sentence in master_troubles(self.status):
            top.append(_line(sentence, "bold red"))
        group = self.group()
        if group is None:
            return Lines(*top, Text("Nobody has joined yet."), self._foot())
        top.append(_line(show.group_line(group), "bold"))
        bottom = list(self._below(group))
        rows = max(1, height - len(top) - len(bottom) - 3)
        return Lines(*top, self._table(group, rows), *bottom, self._foot())

    def _table(self, group: Group, rows: int) -> Any:
        from rich.table import Table
        from rich.text import Text

        members = self.members(group)
        self._first = max(0, min(self._first, len(members) - rows))
        shown = members[self._first : self._first + rows]
        found = show.members_of(group, shown).fitted(screen.width())
        drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="cyan")
        for number, (column, width) in enumerate(zip(found.columns, found.widths(), strict=True)):
            justify: Any = "left" if number == 0 or column in show.WORDS else "right"
            least = None if column == found.columns[-1] else width  # the last one is cut first
            drawn.add_column(
                column, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least
            )
        for number, row in enumerate(found.rows):
            style = "bold red" if number in found.bad else ""
            drawn.add_row(*map(Text, row), style=style)
        return drawn

    def _below(self, group: Group) -> Iterator[Any]:
        if self._help:
            yield _line("")
            for key, what in _KEYS:
                yield _line(f"  {key:5} {what}")
            return
        if group.newcomers:
            yield _line("")
            for newcomer in group.newcomers[:5]:
                waited = duration(newcomer.seconds)
                yield _line(f"newcomer {newcomer.name}, {waited}: {newcomer.reason}", "yellow")
        calls = list(zip(group.calls, show.calls_of(group), strict=True))[:5]
        if calls:
            yield _line("")
        for call, sentence in calls:
            held = bool(call.missing) and call.seconds >= HELD_SECONDS
            yield _line(sentence, "bold red" if held else "")
        for link in [one for one in group.links if one.state in BROKEN][:5]:
            yield _line(f"link {show.link_line(group, link)}", "bold red")
        if self._events and self.status is not None and self.status.events:
            yield _line("")
            for event in self.status.events[-_EVENTS:]:
                style = "yellow" if event.level == "warn" else "dim"
                yield _line(f"{duration(event.seconds_ago):>12} ago  {event.text}", style)

    def _foot(self) -> Any:
        name, _, falling = _ORDERS[self._order]
        most = "greatest" if falling != self._inverted else "least"
        text = f"\nby {name}, {most} first   ? keys   q quit"
        return _line(text, "dim")


def _line(text: str, style: str = "") -> Any:
    """A line that ends with an ellipsis where the terminal does."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


@contextmanager
def _ends_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that the terminal is as before. No Ctrl-Z: it would
    leave the terminal in our modes."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    handlers: dict[signal.Signals, Any] = {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: signal.SIG_IGN,
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keys_in(typed: str) -> list[str]:
    return [_ARROWS.get(key, key) for key in _KEY.findall(typed)]


@contextmanager
def _keys() -> Iterator[Callable[[int], list[str]]]:
    """Keys of the standard input without waiting for Enter, where that is a terminal.

    Yields a function that waits for keys or for `wake`, and returns the keys.
    """
    inputs = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = termios.tcgetattr(inputs) if inputs is not None else None

    def read_keys(wake: int) -> list[str]:
        watched = [wake] if inputs is None else [wake, inputs]
        ready, _, _ = select.select(watched, [], [])
        if wake in ready:
            os.read(wake, 4096)
        if inputs is None or inputs not in ready:
            return []
        typed = os.read(inputs, 64).decode(errors="replace")
        if not typed:
            return ["q"]  # the terminal is gone
        return _keys_in(typed)

    try:
        if inputs is not None:
            tty.setcbreak(inputs)
        yield read_keys
    finally:
        if inputs is not None and before is not None:
            with suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(inputs, termios.TCSADRAIN, before)
