"""Counts methods and data members of the C++ classes, and fails where a class has too many.

A class with more is several types in one: take out those that have state of their own. The rule is
textual: in the body of a class without nested types and bodies of functions, a declaration with
parentheses is a method, any other is a data member. Types, constants, friends and what is deleted
or defaulted count as neither.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
METHODS, MEMBERS = 60, 30
# Class: (methods, data members, reason).
EXCEPTIONS: dict[str, tuple[int, int, str]] = {}

NO_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M
)
CLASS = re.compile(r"\b(?:class|struct)\s+(\w+)(?:\s+final)?(?:\s*:[^;{]*)?\s*\{")
NEITHER = re.compile(
    r"^(?:public|private|protected)$|^(?:using|friend|typedef|enum|struct|class|union|template)\b"
    r"|\bstatic constexpr\b(?![^=]*\()|\bconstexpr static\b|=\s*(?:default|delete)$"
)


class Count(NamedTuple):
    name: str
    methods: int
    members: int


def end_of_block(text: str, start: int) -> int:
    """The position after the brace that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.end()
    raise ValueError("braces do not match")


def declarations(body: str) -> Iterator[str]:
    """The declarations of a class's body; a block is `{}`."""
    while block := re.search(r"\{[^{}]*\}", body):
        body = f"{body[: block.start()]}\0{body[block.end() :]}"
    body = re.sub(r"\b(public|private|protected)\s*:(?!:)", r"\1;", body)
    # A type's or a function's block ends a declaration, an initializer's is followed by one.
    for part in re.split(r";|\0(?!\s*[;,])", body):
        text = " ".join(part.replace("\0", "{}").split())
        while (plain := re.sub(r"<[^<>]*>", "", text)) != text:
            text = plain
        text = re.sub(r"^template ", "", text)
        if text:
            yield text


def counts(text: str) -> Iterator[Count]:
    """One for each class of a header, nested ones included."""
    text = NO_CODE.sub(" ", text)
    for found in CLASS.finditer(text):
        body = text[found.end() : end_of_block(text, found.end() - 1) - 1]
        own = [each for each in declarations(body) if not NEITHER.search(each)]
        # An initializer may have parentheses, too.
        methods = sum("(" in re.split(r"(?<!operator)=", each)[0] for each in own)
        yield Count(found[1], methods, len(own) - methods)


def main() -> int:
    failures, seen = [], 0
    for path in sorted((ROOT / "cpp" / "pccl").rglob("*.h")):
        for name, methods, members in counts(path.read_text()):
            seen += 1
            most, largest, _ = EXCEPTIONS.get(name, (METHODS, MEMBERS, ""))
            if methods > most or members > largest:
                failures.append(
                    f"{path.relative_to(ROOT)}: {name} has {methods} methods and {members} data "
                    f"members; at most {most} and {largest}"
                )
            if "-v" in sys.argv:
                print(f"{methods:4} {members:4} {name}")
    print("\n".join(failures) if failures else f"classes: {seen} are small enough")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
