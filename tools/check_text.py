"""Checks what no other linter does: the language, the size and the names of this project's text.

* Lines of Markdown, of comments and of docstrings have at most 100 columns.
* Sentences begin with their subject. See docs/internals/development.md.
* No file has more than 800 lines, unless LONG_FILES gives the reason.
* No type of the engine has the name of another one, unless SAME_NAMES gives the reason.
* No test keeps a program in a string: programs are modules under tests/programs/.
* A commit's subject reads `room: imperative` and has at most 72 characters.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 100
MAX_LINES = 800
MAX_SUBJECT = 72

# Commits up to this one were made before the rule.
FIRST_COMMIT = "f66f6afed57a32ff0e6274f344a48d20ede3b83d"

LONG_FILES = {
    "benchmarks/wan/relay.cpp": "a program of its own, which lab.py compiles from one file",
}
# Name of a type -> why two rooms may each have one.
SAME_NAMES: dict[str, str] = {}

# Words that were used for something else, and what to write instead.
WORDS = {
    r"\bin_vain\b": "say what failed",
    r"\blimbo\b": "say which phase",
    r"\btold_now_?\b": "known_to_master",
    r"\b_halves\b": "collectives",
}
# A line of code in a comment or a docstring.
COMMAND = re.compile(r"[#/\s]*(?:\$ |python |pccl |pytest |torchrun |make |cmake |PCCL_\w+=)")
# A sentence that opens like this hides its subject; a question or a heading may.
OPENING = re.compile(
    r"(?:^|[.!]\s)((?:Who|Whoever|Whatever|What|Of)\s[a-z][^.?!]*(?:[.!](?=\s|$)|\Z))", re.DOTALL
)


class Prose:
    """Lines that belong together: a paragraph, a comment, a docstring."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path.relative_to(ROOT), number  # of the first line
        self.raw: list[str] = []
        self.said: list[str] = []

    def add(self, raw: str, said: str) -> None:
        self.raw.append(raw)
        self.said.append(said)

    def __str__(self) -> str:
        return "\n".join(self.said)


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *patterns], capture_output=True, check=True
    )
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def grouped(path: Path, lines: Iterable[tuple[int, str, str | None]]) -> Iterator[Prose]:
    """Groups lines of prose that follow each other; None ends a group, as does a blank line."""
    group: Prose | None = None
    for number, raw, said in lines:
        begins = said is not None and re.match(r"\s*([*-] |\d+\. )", said)
        if group and (not said or not said.strip() or begins):
            yield group
            group = None
        if said and said.strip():
            group = group or Prose(path, number)
            group.add(raw, re.sub(r"^\s*([*-] |\d+\. )?", "", said).strip())
    if group:
        yield group


def markdown(path: Path) -> Iterator[Prose]:
    """Paragraphs and items; neither code blocks nor tables, which cannot be broken."""

    def lines() -> Iterator[tuple[int, str, str | None]]:
        fenced = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            begins = line.lstrip()
            fenced ^= begins.startswith(("```", "~~~"))
            prose = not fenced and not begins.startswith(("`" * 3, "|", "#", "![", "<", ":::"))
            yield number, line, line if prose else None

    return grouped(path, lines())


def comments(path: Path, mark: str) -> Iterator[Prose]:
    def lines() -> Iterator[tuple[int, str, str | None]]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.search(rf"^(\s*){mark} ?(.*)$", line)
            beside = re.search(rf"\S.*\s{mark} (.*)$", line)
            if beside and not found:
                yield number, "", None
            yield number, line, found[2] if found else beside[1] if beside else None

    return grouped(path, lines())


def docstrings(path: Path) -> Iterator[Prose]:
    lines = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            numbers = range(first.lineno, (first.end_lineno or first.lineno) + 1)
            yield from grouped(path, ((n, lines[n - 1], lines[n - 1].strip(' "')) for n in numbers))


def all_prose() -> Iterator[Prose]:
    for path in tracked("*.md"):
        yield from markdown(path)
    for path in tracked("*.h", "*.cpp", "*.c", "*.inl"):
        yield from comments(path, "//")
    for path in tracked("*.py", "*.sh", "*.toml", "*.yml", "Makefile", "CMakeLists.txt", ".ci/*"):
        yield from comments(path, "#")
    for path in tracked("*.py"):
        yield from docstrings(path)


def check_prose() -> Iterator[str]:
    for prose in all_prose():
        for offset, raw in enumerate(prose.raw):
            breakable = " " in raw.strip() and "](http" not in raw and not COMMAND.match(raw)
            if len(raw) > MAX_COLUMNS and breakable:
                yield f"{prose.path}:{prose.number + offset}: {len(raw)} columns"
        for found in OPENING.finditer(str(prose)):
            line = prose.number + str(prose)[: found.start(1)].count("\n")
            opening = " ".join(found[1].split())[:60]
            yield f"{prose.path}:{line}: begin the sentence with its subject: {opening}"
        for word, instead in WORDS.items():
            if re.search(word, str(prose)):
                yield f"{prose.path}:{prose.number}: {word}: {instead}"


def check_lengths() -> Iterator[str]:
    for path in tracked("*.py", "*.h", "*.cpp", "*.inl", "*.c"):
        name, lines = str(path.relative_to(ROOT)), len(path.read_text().splitlines())
        if lines > MAX_LINES and name not in LONG_FILES:
            yield f"{name}: {lines} lines; split it, or give the reason in LONG_FILES"


def check_type_names() -> Iterator[str]:
    """Types declared at the top of a header, by name."""
    declared: dict[str, list[str]] = defaultdict(list)
    for path in tracked("cpp/pccl/**/*.h"):
        for name in re.findall(r"^(?:class|struct) (\w+)[^;]*?\{", path.read_text(), re.MULTILINE):
            declared[name].append(str(path.relative_to(ROOT)))
    for name, paths in sorted(declared.items()):
        if len(paths) > 1 and name not in SAME_NAMES:
            yield f"{name} is a type in {', '.join(paths)}: one word, one meaning"


def is_program(text: str) -> bool:
    if text.count("\n") < 3:
        return False
    if "#include" in text:
        return True
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree))


def check_programs() -> Iterator[str]:
    for path in tracked("tests/**/*.py", "tests/*.py"):
        tree = ast.parse(path.read_text())
        quoted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
                  for part in node.values}  # fmt: skip
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value if id(node) not in quoted else ""
            elif isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "0" for p in node.values)
                text = "".join(str(part) for part in parts)
            if text and is_program(text):
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
                yield f"{place}: a program in a string; make it a module under tests/programs/"


def check_subjects() -> Iterator[str]:
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", f"{FIRST_COMMIT}^{{commit}}"],
                           capture_output=True, check=False)  # fmt: skip
    if known.returncode:
        return  # a shallow clone, or none
    log = subprocess.run(
        [*git, "log", "--no-merges", "--format=%h %s", f"{FIRST_COMMIT}..HEAD"],
        capture_output=True,
        check=True,
        text=True,
    )
    for line in log.stdout.splitlines():
        commit, subject = line.split(" ", 1)
        if len(subject) > MAX_SUBJECT or not re.match(r"[\w./, -]+: \S", subject):
            yield f"{commit}: the subject is not `room: imperative` in 72 characters: {subject}"


def main() -> int:
    if not (ROOT / ".git").exists():
        print("text: not checked, this is no git checkout")
        return 0
    checks = (check_prose, check_lengths, check_type_names, check_programs, check_subjects)
    failures = [failure for check in checks for failure in check()]
    print("\n".join(failures) if failures else "text: keeps the rules")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
