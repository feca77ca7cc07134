"""Parsers of the commands: help that begins with examples, and errors of one sentence."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

__all__ = ["MISUSE", "Example", "Parser", "arguments", "explained"]

MISUSE = 2  # exit status of a command that was called wrongly


class Example(NamedTuple):
    """A command line and what it is for."""

    command: str
    purpose: str


class Parser(argparse.ArgumentParser):
    """A command's parser.

    Args:
        examples: What the help begins with.
        notes: Paragraphs after the options. Indented lines stay as they are.
        then: One line: what to do next.
        form: What follows the command's name in the usage. Default: made from the arguments.
        settings: Of `argparse.ArgumentParser`.
    """

    def __init__(
        self,
        *,
        examples: Sequence[Example] = (),
        notes: str = "",
        then: str = "",
        form: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.examples = tuple(examples)
        self.notes = notes
        self.then = then
        if form:
            self.usage = f"{self.prog} {form}"
        self._positionals.title = "Arguments"
        self._optionals.title = "Options"

    def commands(self) -> dict[str, Parser]:
        """The parsers of the subcommands by name."""
        choices: Any = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                choices = action.choices
        return dict(choices)

    def format_help(self) -> str:
        formatter = self._get_formatter()
        width = formatter._width  # of the terminal
        formatter.add_text(_filled(self.description or "", width))
        if self.examples:
            formatter.start_section("Examples")
            lines = (f"# {each.purpose}\n{each.command}" for each in self.examples)
            formatter.add_text("\n".join(lines))
            formatter.end_section()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups, "Usage: ")
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(_filled(self.notes, width))
        if self.then:
            formatter.add_text(_filled(f"Next: {self.then}", width))
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Prints one sentence and ends with status 2."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(MISUSE)


def _filled(text: str, width: int) -> str:
    """Paragraphs as wide as the terminal."""
    blocks = text.strip("\n").split("\n\n")
    wrapper = textwrap.TextWrapper(width, break_on_hyphens=False, break_long_words=False)
    return "\n\n".join(b if b.startswith(" ") else wrapper.fill(b) for b in blocks)


def arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments that a reader sees, in order; subcommands are none."""
    for action in parser._actions:
        hidden = action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction)
        if not hidden and not isinstance(action, argparse._SubParsersAction):
            yield action


def explained(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The argument's help with its default filled in."""
    return parser._get_formatter()._expand_help(action)
