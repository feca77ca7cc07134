"""The code blocks of a page in Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^>]+) -->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
_COMMAND = re.compile(r"(?:pccl|python|make|pip) |PCCL_\w+=")
_PROGRAM = re.compile(r"# (\w+\.py)(?:: .*)?\n")


@dataclass(frozen=True)
class Block:
    """Attributes:
    line: The line of the page with the block's head.
    reason: Why no test runs it; empty: one does.
    """

    line: int
    language: str
    text: str
    reason: str

    @property
    def program(self) -> str:
        """The name of the file that it is; empty where it is a part of one."""
        named = _PROGRAM.match(self.text)
        return named[1] if named else ""

    def run_as_program(self, page: str) -> bool:
        """Whether test_readme.py or test_guide.py runs it, on two peers."""
        head = f"# {self.program}"
        if not page.endswith("README.md"):
            head += f": pccl run -n 2 -- python {self.program}"
        return bool(self.program) and self.text.startswith(f"{head}\n")


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(page):
        line = page.count("\n", 0, found.start("text"))
        text = textwrap.dedent(found["text"])
        language = found["language"]
        if not language and _COMMAND.match(text):
            language = "bash"
        if not language and text.startswith("$ "):  # and what the commands print
            language = "bash"
            text = "\n".join(row[2:] for row in text.splitlines() if row.startswith("$ "))
        yield Block(line, language, text, (found["reason"] or "").strip())
