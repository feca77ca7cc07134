"""The code on the pages does what the pages say, or a comment says why no test runs it.

`<!-- not run: REASON -->` right before a block is such a comment. Python blocks of a page run in
order in one process, after the setup in tests/pages/. Commands of pccl that end by themselves are
run, all others are parsed. test_readme.py and test_guide.py run whole programs.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from forked import Forked
from pages.blocks import Block, blocks

from pccl import master
from pccl.tools import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# `text` is output, or a picture; the site draws mermaid.
LANGUAGES = {"python", "bash", "c", "yaml", "ini", "text", "mermaid"}
# Programs that no test runs, and why.
NOT_RUN = {
    "git": "needs the network",
    "pip": "changes this environment; `make package` installs the wheel",
    "sudo": "changes this machine",
    "cd": "of the reader's shell",
    ".": "of the reader's shell",
    "true": "does nothing",
    "sleep": "does nothing",
    "exit": "of the reader's shell",
    "umask": "of the reader's shell",
    "echo": "does nothing",
    "export": "of the reader's shell; its variables are checked",
    "nft": "changes this machine",
    "scp": "needs the network",
    "ssh": "needs the network",
    "pkill": "of the reader's processes",
    "curl": "needs the network",
    "kubectl": "needs a cluster; tests/test_kubernetes.py checks the manifests",
    "sbatch": "needs a cluster; tests/test_slurm.py starts one, and runs the scripts",
}
# A shell's words around commands.
KEYWORDS = {"while", "until", "do", "done", "if", "then", "else", "fi", "!", "exec"}
# Variables that the pages set and pccl does not read.
FOREIGN = {
    "RUN_FOLDER",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "REPLICA",
    "OMP_NUM_THREADS",
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT).with_suffix(""))


def blocks_of(path: Path, *languages: str) -> list[Block]:
    return [b for b in blocks(path.read_text()) if not b.reason and b.language in languages]


def fragments(path: Path) -> list[Block]:
    return [b for b in blocks_of(path, "python") if not b.run_as_program(str(path))]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_every_block_is_of_a_language_that_is_run_or_has_a_reason(path: Path) -> None:
    for block in blocks(path.read_text()):
        assert block.reason or block.language in LANGUAGES, f"{path}:{block.line}"


@pytest.mark.parametrize("path", [*filter(fragments, PAGES)], ids=name)
def test_the_python_of_a_page_runs(path: Path, tmp_path: Path) -> None:
    needed = re.findall(r"^(?:import|from) (torch|jax|optax|safetensors)\b", prepared(path), re.M)
    for module in needed:
        pytest.importorskip(module)
    runner = ROOT / "tests" / "pages" / "run_page.py"
    with tempfile.TemporaryFile() as output:
        program = Forked(
            [str(runner), str(setup(path)), str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ,
            cwd=tmp_path,
            kind="torch" if "torch" in needed else "numpy",
        )
        try:
            status = program.wait(280)
        finally:
            program.kill()
        output.seek(0)
        assert status == 0, output.read().decode()


def setup(path: Path) -> Path:
    return ROOT / "tests" / "pages" / path.relative_to(ROOT).with_suffix(".py")


def prepared(path: Path) -> str:
    return setup(path).read_text() if setup(path).exists() else ""


# ---- commands

Command = tuple[dict[str, str], list[str]]  # variables, words


def commands(text: str) -> Iterator[Command]:
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s\d?>+\s*\S+?(?=\)|\s|$)", "", line)  # where output goes
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        variables: dict[str, str] = {}
        words: list[str] = []
        for word in [*lexer, ";"]:
            if re.fullmatch("[;|&()]+", word):
                if words or variables:
                    yield variables, words
                variables, words = {}, []
            elif not words and word in KEYWORDS:
                continue
            elif not words and (given := re.fullmatch(r"(\w+)=(.*)", word)):
                variables[given[1]] = given[2]
            else:
                words.append(word)


COMMANDS = [
    pytest.param(path, variables, words, id=f"{name(path)}:{block.line}: {' '.join(words)}"[:80])
    for path in PAGES
    for block in blocks_of(path, "bash")
    for variables, words in commands(block.text)
]


@pytest.mark.parametrize(("path", "variables", "words"), COMMANDS)
def test_a_command_of_a_page_is_right(
    path: Path, variables: dict[str, str], words: list[str]
) -> None:
    if words[:1] == ["export"]:
        variables = dict(word.split("=", 1) for word in words[1:])
    known = set(re.findall(r"PCCL_\w+", (ROOT / "docs/reference/settings.md").read_text()))
    assert variables.keys() <= known | FOREIGN
    if words:
        check(words, path)


def check(words: list[str], page: Path) -> None:
    """Runs a command that ends by itself, or finds out whether it could be run."""
    program, *arguments = words
    if program == "pccl":
        check_pccl(arguments, page)
    elif program == "pccl_master":
        parse(master.parser(), arguments)
    elif program in ("python", "python3", "torchrun"):
        check_script(arguments, page)
    elif program == "make":
        check_make(arguments)
    else:
        assert program in NOT_RUN, f"{page}: say why no test runs {program}"


def check_pccl(arguments: list[str], page: Path) -> None:
    given, program = arguments, list[str]()
    if arguments[:1] == ["run"] and "--" in arguments:
        at = arguments.index("--")
        given, program = arguments[:at], arguments[at + 1 :]
        check(program, page)
    if parse(cli.parser(), given) or given == ["secret"] or program[:2] == ["python", "-c"]:
        command = [sys.executable, "-m", "pccl", *arguments]
        subprocess.run(
            command, check=True, capture_output=True, timeout=60, cwd=tempfile.gettempdir()
        )


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> bool:
    """Returns whether they ask only for help or the version."""
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        assert end.code == 0, f"{arguments}: see the standard error"
        return True
    return False


def check_script(arguments: list[str], page: Path) -> None:
    if arguments[0] == "-m" and arguments[1] == "pccl":
        check_pccl(arguments[2:], page)
        return
    if arguments[0] in ("-m", "-c"):
        assert arguments[0] == "-c" or importlib.util.find_spec(arguments[1])
        return
    at, script = next((i, word) for i, word in enumerate(arguments) if word.endswith(".py"))
    if "/" not in script:
        assert script in programs(), f"{page}: no page has the program {script}"
        return
    assert (ROOT / script).is_file()
    options = [word.partition("=")[0] for word in arguments[at + 1 :] if word.startswith("--")]
    if options:
        assert set(options) <= set(re.findall(r"--[\w-]+", (ROOT / script).read_text()))


def check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        target, _, value = word.partition("=")
        pattern = rf"\b{target}\b" if value else rf"^{target}:"
        assert re.search(pattern, makefile, re.MULTILINE), word


@cache
def programs() -> set[str]:
    return {block.program for path in PAGES for block in blocks(path.read_text())}


# ---- files


def read_yaml(text: str) -> bool:
    return any(pytest.importorskip("yaml").safe_load_all(text))  # mkdocs needs it


def read_ini(text: str) -> bool:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(text)
    return bool(parser.sections())


READERS = {"yaml": read_yaml, "ini": read_ini}


@pytest.mark.parametrize("path", [path for path in PAGES if blocks_of(path, *READERS)], ids=name)
def test_a_file_of_a_page_can_be_read(path: Path) -> None:
    for block in blocks_of(path, *READERS):
        assert READERS[block.language](block.text), f"{path}:{block.line}"


# ---- C


@pytest.mark.parametrize("path", [path for path in PAGES if blocks_of(path, "c")], ids=name)
def test_the_c_of_a_page_compiles(path: Path, tmp_path: Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a compiler")
    for block in blocks_of(path, "c"):
        (tmp_path / "block.inc").write_text(block.text)
        include = (f"-I{ROOT / 'cpp' / 'include'}", f"-I{tmp_path}")
        program = str(setup(path).with_suffix(".c"))
        subprocess.run(
            ["cc", "-std=c99", "-Wall", "-Werror", "-fsyntax-only", *include, program], check=True
        )
