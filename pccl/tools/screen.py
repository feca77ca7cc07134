"""How the commands print: rich on a terminal, plain text elsewhere; no colors with `NO_COLOR`."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import IO, Any, Literal, NamedTuple

__all__ = [
    "Check",
    "Verdict",
    "bar",
    "checks",
    "console",
    "failure",
    "heading",
    "helped",
    "is_terminal",
    "line",
    "note",
    "noted",
    "paint",
    "table",
    "verdict",
    "width",
]

Verdict = Literal["ok", "warn", "fail", "info"]

_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "info": ""}
_STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "info": ""}
_CYAN, _RED = 36, 31  # of ANSI
_RANK_COLORS = (_CYAN, 33, 32, 35, 34, _RED)


class Check(NamedTuple):
    """A line of a screen of findings."""

    name: str
    verdict: Verdict
    text: str


def is_terminal(stream: IO[Any] | None) -> bool:
    """Whether it is one. A stream may be missing, closed, or a program's own with less methods."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError, OSError):
        return False


def console(stream: IO[Any] | None) -> Any:
    """A rich console for the stream; None where it is no terminal, or rich is missing."""
    if not is_terminal(stream):
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    if os.environ.get("NO_COLOR"):
        return Console(file=stream, color_system=None, highlight=False)
    return Console(file=stream, highlight=False)


def paint(text: str, rank: int, stream: IO[Any]) -> str:
    """`text` in the color of that rank, where the stream shows colors."""
    shown = console(stream)
    if shown is None or shown.color_system is None:
        return text
    return f"\x1b[{_RANK_COLORS[rank % len(_RANK_COLORS)]}m{text}\x1b[0m"


def noted(command: str, text: str) -> bytes:
    """The line of `note`, for who writes it to the standard error by himself."""
    return _sentence(command, text, _CYAN).encode(sys.stderr.encoding, "backslashreplace")


def note(command: str, text: str) -> None:
    """A line on the standard error about what the command does."""
    _say(command, text, _CYAN)


def failure(command: str, text: str) -> None:
    """A line on the standard error about why the command ends."""
    _say(command, text, _RED)


def _say(command: str, text: str, color: int) -> None:
    # A standard error that is full, closed or missing is no reason to end.
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(_sentence(command, text, color))
        sys.stderr.flush()


def _sentence(command: str, text: str, color: int) -> str:
    shown = console(sys.stderr)
    if shown is None or shown.color_system is None:
        return f"{command}: {text}\n"
    return f"\x1b[1;{color}m{command}: \x1b[0m{text}\n"


def helped(text: str, stream: IO[Any]) -> str:
    """The text of a help with its headings in bold, where the stream shows colors."""
    shown = console(stream)
    if shown is None or shown.color_system is None:
        return text
    text = re.sub(r"^([A-Z]\w+:)(?= |$)", "\x1b[1m\\1\x1b[0m", text, flags=re.MULTILINE)
    return re.sub(r"^(  # .*)$", "\x1b[2m\\1\x1b[0m", text, flags=re.MULTILINE)


def verdict(text: str, *, good: bool) -> None:
    """The last line of a screen."""
    shown = console(sys.stdout)
    if shown is None:
        print(text)
        return
    from rich.text import Text

    shown.print(Text(text, style="bold green" if good else "bold red"))


def line(text: str) -> None:
    """A sentence on the standard output, as wide as that is."""
    shown = console(sys.stdout)
    if shown is None:
        limit = _limit()
        print(textwrap.fill(text, limit, break_on_hyphens=False) if limit else text)
        return
    from rich.text import Text

    shown.print(Text(text))


def heading(text: str) -> None:
    """A line above what belongs together, after an empty one."""
    shown = console(sys.stdout)
    print()
    if shown is None:
        line(text)
        return
    from rich.text import Text

    shown.print(Text(text, style="bold"))


def width() -> int | None:
    """The columns of the standard output; None where nothing bounds them."""
    shown = console(sys.stdout)
    return _limit() if shown is None else int(shown.width)


def _limit() -> int | None:
    """The columns of plain text, where `COLUMNS` tells; `pccl run` sets it for its ranks."""
    given = os.environ.get("COLUMNS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None


def checks(found: Sequence[Check]) -> None:
    """A line for each: the mark, the name and the text. On a terminal the text is wrapped."""
    shown = console(sys.stdout)
    if shown is None:
        width = max(len(check.name) for check in found)
        for check in found:
            print(f"{_MARKS[check.verdict]:4}  {check.name:{width}}  {check.text}")
        return
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, width=4)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for check in found:
        style = _STYLES[check.verdict]
        grid.add_row(Text(_MARKS[check.verdict], style=style), check.name, Text(check.text))
    shown.print(grid)


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[str] = (),
    bad: Collection[int] = (),
) -> None:
    """A table. Where it is wider than the terminal, each row is printed as lines `name: cell`.

    Args:
        title, columns, rows: What is in it. Cells of all columns but the first are aligned right.
        words: Further columns that are aligned left.
        bad: Numbers of the rows that are red on a terminal.
    """
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    shown = console(sys.stdout)
    print()
    if shown is None:
        _plain(title, columns, rows, widths, words)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown.print(Text(title, style="bold"))
    drawn = Table(box=box.ROUNDED)
    if sum(widths) + 3 * len(widths) + 1 > shown.width:  # then without lines
        drawn.box, drawn.padding = None, (0, 2, 0, 0)
    if sum(widths) + 2 * len(widths) > shown.width:
        drawn.box, drawn.padding = box.ROUNDED, (0, 1)
        drawn.show_header = False
        drawn.add_column(style="cyan", overflow="fold")
        drawn.add_column(overflow="fold", justify="right")
        for number, row in enumerate(rows):
            style = "bold red" if number in bad else ""
            for name, cell in zip(columns, row, strict=True):
                drawn.add_row(name, Text(cell, style=style), end_section=name == columns[-1])
    else:
        for number, column in enumerate(columns):
            justify: Any = "right" if number and column not in words else "left"
            drawn.add_column(column, justify=justify, no_wrap=True, header_style="cyan")
        for number, row in enumerate(rows):
            drawn.add_row(*map(Text, row), style="bold red" if number in bad else "")
    shown.print(drawn)


def _plain(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    words: Collection[str],
) -> None:
    line(title)
    limit = _limit()
    if limit and sum(widths) + 2 * (len(widths) - 1) > limit:
        names = max(map(len, columns))
        cells = max(len(cell) for row in rows for cell in row)
        for row in rows:
            for name, cell in zip(columns, row, strict=True):
                print(f"{name:{names}}  {cell:>{cells}}")
            print()
        return
    for row in (columns, *rows):
        cells_of = zip(row, widths, columns, strict=True)
        aligned = [
            cell.ljust(width) if name in words or name == columns[0] else cell.rjust(width)
            for cell, width, name in cells_of
        ]
        print("  ".join(aligned).rstrip())


def bar(title: str) -> Any:
    """A progress bar of bytes on the standard error; None where that is no terminal."""
    shown = console(sys.stderr)
    if shown is None:
        return None
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.table import Column

    columns = [
        TextColumn(title, table_column=Column(no_wrap=True), style="bold cyan"),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
        DownloadColumn(table_column=Column(no_wrap=True)),
    ]
    if shown.width >= 70:
        columns.append(TransferSpeedColumn(table_column=Column(no_wrap=True)))
    return Progress(*columns, console=shown, expand=shown.width < 100)
