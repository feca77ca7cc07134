"""Makes the site's pages of the sources, beside `tools/diagrams.py`, while mkdocs builds them.

* GitHub's `> [!NOTE]` becomes an admonition.
* A link to a file of the source tree outside of docs/ becomes its text: the site has only docs/.
* A page that would fetch anything from another host is an error.
"""

import posixpath
import re
from html.parser import HTMLParser
from typing import Any

from mkdocs.exceptions import PluginError

NOTE = re.compile(r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:>.*\n?)+)", re.MULTILINE)
KINDS = {"important": "info", "caution": "danger"}  # Material's names, where they differ
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)]*)?\)")
# Attributes that make a browser fetch something while it shows the page.
FETCHED = {"src", "srcset", "poster", "data", "action"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return LINK.sub(lambda link: _inside(link, page.file.src_uri), NOTE.sub(_admonition, markdown))


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    found = foreign(output)
    if found:
        raise PluginError(f"{page.file.src_uri}: fetches {', '.join(found)}")
    return output


def foreign(html: str) -> list[str]:
    """Addresses of other hosts that a browser would fetch from to show `html`."""
    reader = _Reader()
    reader.feed(html)
    return reader.found


def _admonition(block: re.Match[str]) -> str:
    kind = block[1].lower()
    lines = [re.sub("^> ?", "", line) for line in block[2].splitlines()]
    body = "\n".join("    " + line if line else "" for line in lines)
    return f"!!! {KINDS.get(kind, kind)}\n\n{body}\n"


def _inside(link: re.Match[str], page: str) -> str:
    target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link[2]))
    if target.startswith("docs/"):
        return link[0]
    return f'<span class="source" title="{target}">{link[1]}</span>'


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        for name, value in attrs:
            fetched = name in FETCHED or (name in ("href", "xlink:href") and tag != "a")
            if fetched and re.match(r"\s*(?:https?:)?//", value or ""):
                self.found.append(f"<{tag} {name}={value}>")
            elif name == "style":
                self._read_style(value or "")

    def handle_data(self, data: str) -> None:
        if self._style:
            self._read_style(data)

    def handle_endtag(self, tag: str) -> None:
        self._style = False

    def _read_style(self, text: str) -> None:
        self.found += re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\"')\s]*", text)
