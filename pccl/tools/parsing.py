"""Parsers of the commands: help that begins with examples, and errors of one sentence."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from pccl.errors import PCCLError
from pccl.tools import screen

__all__ = [
    "MISUSE",
    "Example",
    "Misuse",
    "Parser",
    "add_master",
    "advised",
    "arguments",
    "endpoint",
    "endpoints",
    "explained",
    "reason_of",
    "seconds",
    "whole",
]

MISUSE = 2  # exit status of a command that was called wrongly


# Parts of the reasons that the engine and the system give -> what to do.
_ADVICE = {
    "Connection refused": "start `pccl master` there, or correct the address",
    "Host not found": "correct the host's name",
    "cannot be resolved": "correct the host's name",
    "Address already in use": "take another port, or stop the program that listens there",
    "Cannot assign requested address": "take 0.0.0.0 or an address of this machine",
    "not pccl's control protocol": "correct the port: `pccl master` prints it",
    "this is no pccl master": "correct the port: `pccl master` prints it",
    "does not speak TLS": "correct the port, or start the master with the run's secret",
    "refuses our secret": "set PCCL_SECRET to the one that `pccl master` uses",
    "cannot read": "give the path of a file that holds the run's secret and that you may read",
    "cannot make the secret": "give the path of a file in a folder that you may write to",
    "no answer": "correct the address, or open the port in the firewalls between",
    "timed out": "correct the address, or open the port in the firewalls between",
    "No route to host": "correct the address, or open the port in the firewalls between",
    "unreachable": "correct the address, or connect this machine to that network",
    "the connection broke": "correct the port: `pccl master` prints it",
    "closed the connection": "correct the port: `pccl master` prints it",
}


class Misuse(Exception):
    """A command that cannot begin. The text is one sentence: what is wrong, and what to do."""


def advised(reason: str) -> str:
    """The reason, and what to do about it if that is known."""
    for part, advice in _ADVICE.items():
        if part in reason:
            return f"{reason.partition('; was it ')[0]}; {advice}"
    return reason


def reason_of(error: PCCLError) -> str:
    """The error's reason, and what to do about it if that is known."""
    return advised(error.reason or str(error))


def endpoint(text: str) -> str:
    """Reads what may be host:port. The engine knows the details."""
    if "://" in text:
        sentence = f"must be a host and a port, without a protocol, not {text!r}"
        raise argparse.ArgumentTypeError(sentence)
    if not text.rpartition(":")[0] and (":" in text or not text) or not text.isprintable():
        sentence = f"must be a host and a port, as in 192.0.2.7:48148, not {text!r}"
        raise argparse.ArgumentTypeError(sentence)
    return text


def endpoints(text: str) -> str:
    """Reads one or several of what may be host:port, with commas between them."""
    return ",".join(endpoint(part.strip()) for part in text.split(","))


def whole(low: int, high: int) -> Callable[[str], int]:
    """Reads a whole number in low..high."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            sentence = f"must be a whole number in {low}..{high}, not {text!r}"
            raise argparse.ArgumentTypeError(sentence)
        return number

    return read


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Reads a number of seconds in low..high."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            sentence = f"must be seconds in {low:g}..{high:g}, not {text!r}"
            raise argparse.ArgumentTypeError(sentence)
        return number

    return read


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
        self.color = False  # of argparse's own, in newer versions of Python; see `print_help`
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
        width = max(20, formatter._width)  # of the terminal
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

    def print_help(self, file: Any = None) -> None:
        stream = sys.stdout if file is None else file
        stream.write(screen.helped(self.format_help(), stream))

    def error(self, message: str) -> NoReturn:
        """Prints one sentence and ends with status 2."""
        screen.failure(self.prog, f"{self._plain(message)} (see {self.prog} --help)")
        sys.exit(MISUSE)

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends with a sentence about arguments that nothing takes."""
        first = unknown[0].partition("=")[0]
        if not first.startswith("-"):
            self.error(f"{first!r} is one argument too many; leave it out")
        known = [name for action in self._actions for name in action.option_strings]
        self.error(f"there is no option {first}{_like(first, known) or '; leave it out'}")

    def _plain(self, message: str) -> str:
        """argparse's message as a sentence that says what to do, in all versions of Python."""
        commands = self.commands()
        if commands and (choice := re.search(r"invalid choice: '?([^'\s,]*)", message)):
            name = choice[1]
            near = _like(name, list(commands)) or f"; the commands are {', '.join(commands)}"
            return f"there is no command {name!r}{near}"
        found = re.fullmatch(r"argument (\S+?)(?:/\S+)?: (.*)", message, re.DOTALL)
        if found is None:
            return message
        name, rest = found[1], found[2]
        if choice := re.match(r"invalid choice: (.*) \(choose from (.*)\)", rest):
            return f"{name} must be {choice[2].replace(chr(39), '')}, not {choice[1]}"
        if other := re.match(r"not allowed with argument (\S+)", rest):
            return f"{name} and {other[1]} exclude each other; give one of them"
        if rest.startswith("expected one argument"):
            return f"{name} needs a value; write one after it"
        if rest.startswith("ignored explicit argument"):
            return f"{name} takes no value; leave it out"
        return f"{name} {rest}"


def add_master(parser: argparse.ArgumentParser, metavar: str = "MASTER") -> None:
    """The argument of a command that asks a master; `status.master_of` reads it."""
    words = "the master, or several with commas (default: PCCL_MASTER)"
    parser.add_argument("master", nargs="?", type=endpoints, metavar=metavar, help=words)


def _like(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


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
