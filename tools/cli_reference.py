"""Writes docs/reference/cli.md from the parsers: `python tools/cli_reference.py`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from pccl import master
from pccl.tools import cli
from pccl.tools.parsing import Parser, arguments, explained

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"

HEAD = """\
# Commands

<!-- Written by tools/cli_reference.py from the parsers. Change those, then run it. -->

`python -m pccl` is the same as `pccl`. A command that was called wrongly prints one sentence on the
standard error and ends with status 2. All commands print plain text where the output is no
terminal; `NO_COLOR` turns colors off.
"""


def reference() -> str:
    """The page in Markdown: a section for each command."""
    top = cli.parser()
    parsers = [top, *top.commands().values(), master.parser()]
    return "\n".join([HEAD, *(line for parser in parsers for line in _section(parser))])


def _section(parser: Parser) -> Iterator[str]:
    yield f"## {parser.prog}\n"
    yield f"{_marked(parser.description or '')}\n"
    yield "```bash"
    for each in parser.examples:
        yield f"# {each.purpose}"
        yield each.command
    yield "```\n"
    rows = list(arguments(parser))
    if rows:
        yield "| argument | meaning |"
        yield "|---|---|"
        for action in rows:
            names = action.option_strings or [""]
            value = "" if action.nargs == 0 else f"{action.metavar or action.dest.upper()}"
            shown = ", ".join(f"{name} {value}".strip() for name in names)
            yield f"| `{shown}` | {_marked(explained(parser, action))} |"
        yield ""
    for paragraph in [*parser.notes.strip().split("\n\n"), f"Next: {parser.then}"]:
        if paragraph:
            yield f"{_filled(_marked(paragraph))}\n"


def _filled(paragraph: str) -> str:
    """Lines of at most 100 columns; an indented block becomes code."""
    if paragraph.startswith(" "):
        return f"```text\n{textwrap.dedent(paragraph)}\n```"
    return textwrap.fill(paragraph, 100, break_on_hyphens=False, break_long_words=False)


def _marked(text: str) -> str:
    """Names of settings and options as code; a table's bars escaped."""
    name = r"`[^`]*`|(?<![\w-])(?:PCCL_\w+(?:=[\w.]+)?|--[a-z-]+)"
    return re.sub(name, lambda found: f"`{found[0].strip('`')}`", text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(reference())
