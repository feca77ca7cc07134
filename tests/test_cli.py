"""The `pccl` command: its help and its reference."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from pccl import master
from pccl.tools import cli
from pccl.tools.parsing import Parser, arguments

ROOT = Path(__file__).resolve().parent.parent
TOP = cli.parser()
PARSERS = [TOP, *TOP.commands().values(), master.parser()]


def of_tools(name: str) -> ModuleType:
    """A module of the folder tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_commands_is_what_the_parsers_say() -> None:
    tool = of_tools("cli_reference")
    assert tool.PAGE.read_text() == tool.reference(), "run python tools/cli_reference.py"


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_begins_with_examples_and_ends_with_what_to_do_next(
    parser: Parser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = parser.format_help().splitlines()
    assert lines[0].startswith(parser.description[:40])
    assert lines[2] == "Examples:"
    assert lines[3] == f"  # {parser.examples[0].purpose}"
    assert lines[4] == f"  {parser.examples[0].command}"
    assert lines.index(next(line for line in lines if line.startswith("Usage: "))) > 4
    assert lines[-1].startswith("Next: ")


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_every_option_tells_its_default_and_every_example_is_of_the_command(parser: Parser) -> None:
    for action in arguments(parser):
        if action.dest not in ("version", "program"):
            assert "(default" in action.help or "(required)" in action.help, action.dest
    if parser is not TOP:
        assert all(parser.prog in each.command for each in parser.examples)
