"""The pages under docs/ name everything that the code has."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import pccl
import pccl.errors
from pccl import _testing

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
DECISIONS = DOCS / "internals" / "decisions"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def page(name: str) -> str:
    return (DOCS / name).read_text()


def protocol() -> str:
    return page("internals/protocol.md")


def architecture() -> str:
    return page("internals/architecture.md")


def source(path: str) -> str:
    return (ROOT / "cpp" / "pccl" / path).read_text()


def words_of(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows of a page."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_variable_of_the_library_is_a_setting_in_the_docs() -> None:
    python = [path.read_text() for path in (ROOT / "pccl").rglob("*.py")]
    read = set(re.findall(r"\bPCCL_[A-Z_]+[A-Z]\b", "".join([source("base/settings.h"), *python])))
    assert "PCCL_STRIPES" in read and "PCCL_MASTER" in read
    assert read <= words_of(page("reference/settings.md"))


def test_every_control_message_has_its_row_with_its_number_and_fields() -> None:
    header = source("wire/messages.h")
    listed = re.search(r"using Message =\s+std::variant<(.*?)>;", header, re.DOTALL)
    assert listed
    messages = [name.strip() for name in listed[1].split(",")]
    numbers = {cells[1]: cells[0] for cells in rows(protocol()) if len(cells) == 5}
    described = {
        name: words_of(cells[1])
        for cells in rows(protocol().partition("### Fields")[2].partition("## Records")[0])
        if len(cells) == 2
        for name in cells[0].split(", ")
    }
    for number, name in enumerate(messages):
        assert numbers[name] == str(number)
        body = re.search(rf"^struct {name} \{{(.*?)^\}};", header, re.DOTALL | re.MULTILINE)
        assert body
        visited = re.search(r"visit\(([^)]*)\)", body[1])
        fields = re.findall(r"self\.(\w+)", visited[1]) if visited else []
        missing = set(fields) - described[name]
        assert not missing, f"{name}: {missing}"


def test_every_record_on_the_wire_is_described() -> None:
    structs = set(re.findall(r"^struct (\w+)", source("wire/records.h"), re.MULTILINE))
    assert structs - words_of(protocol()) <= {"Departure", "OpState"}  # described in place


def test_every_kind_of_round_is_described() -> None:
    listed = re.search(r"enum class RoundKind[^{]*\{(.*?)\};", source("wire/records.h"), re.DOTALL)
    assert listed
    kinds = words_of(listed[1])
    assert "sync_detail" in kinds
    assert kinds <= words_of(protocol())


def test_every_frame_has_its_row_with_its_number() -> None:
    listed = re.search(r"enum class FrameType[^{]*\{(.*?)\};", source("link/frame.h"), re.DOTALL)
    assert listed
    frames = re.findall(r"^\s*(\w+),", listed[1], re.MULTILINE)
    by_name = {cells[1]: cells[0] for cells in rows(protocol()) if len(cells) == 6}
    assert {name: by_name.get(name) for name in frames} == {
        name: str(number) for number, name in enumerate(frames)
    }


def test_every_field_of_the_frame_header_is_described_at_its_offset() -> None:
    body = re.search(r"struct FrameHeader \{(.*?)\n\};", source("link/frame.h"), re.DOTALL)
    assert body
    declared = re.findall(r"^  ([\w:]+) (\w+)(?:\{\}|\s*=\s*[^;]+)?;", body[1], re.MULTILINE)
    sizes = {"std::uint64_t": 8, "std::uint32_t": 4, "std::uint16_t": 2, "std::uint8_t": 1}
    sizes |= {"FrameType": 1, "bool": 1, "wire::OpKey": 25}
    described = {cells[2]: cells[:2] for cells in rows(protocol()) if len(cells) == 4}
    offset = 0
    for kind, name in declared:
        if not name.startswith("padding"):
            assert described[name] == [str(offset), str(sizes[kind])], name
        offset += sizes[kind]
    assert offset == 72


def test_every_exception_has_its_row_with_its_advice() -> None:
    by_name = {
        cells[0].strip("`"): cells[-1]
        for cells in rows(page("guide/failure.md"))
        if len(cells) == 4
    }
    for name in pccl.errors.__all__:
        cls = getattr(pccl.errors, name)
        if issubclass(cls, pccl.PCCLError) and cls is not pccl.PCCLError:
            assert by_name.get(name) == cls.advice, name


def test_every_page_is_in_the_navigation_once_or_a_decision_in_their_index() -> None:
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", navigation, re.MULTILINE)
    decisions = [f"internals/decisions/{cells[0][6:-1]}" for cells in indexed_decisions()]
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(named + decisions) == sorted(pages)


@pytest.mark.parametrize(
    ("fetched", "html"),
    [
        (False, '<a href="https://example.org/">text</a> <img src="images/run.svg">'),
        (False, '<svg xmlns="http://www.w3.org/2000/svg"><style>a{fill:url(#b)}</style></svg>'),
        (True, '<img src="https://example.org/a.png">'),
        (True, '<script src="//example.org/a.js"></script>'),
        (True, '<link rel="stylesheet" href="http://example.org/a.css">'),
        (True, "<style>@import 'https://example.org/a.css';</style>"),
        (True, '<p style="background: url(https://example.org/a.png)">'),
    ],
)
def test_a_page_of_the_site_may_link_to_other_hosts_but_fetch_nothing(
    fetched: bool, html: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    site = importlib.import_module("site_pages")
    assert bool(site.foreign(html)) is fetched


def test_every_header_that_a_comment_names_is_there() -> None:
    sources = [
        path
        for path in (ROOT / "cpp").rglob("*")
        if path.suffix in (".h", ".cpp", ".inl") and path.is_file()
    ]
    known = {path.name for path in sources}
    for path in sources:
        comments = re.findall(r"//.*|/\*.*?\*/", path.read_text())
        named = set(re.findall(r"(?<![/<\w])(\w+\.(?:h|inl))\b", "\n".join(comments)))
        assert named <= known, f"{path}: {named - known}"


def test_every_public_name_is_in_the_reference() -> None:
    assert set(pccl.__all__) <= words_of(page("reference/overview.md"))


def test_calls_in_the_reference_have_the_parameters_of_the_code() -> None:
    shown = re.findall(r"^\| `(\w+)\(([^`]*)\)`", page("reference/overview.md"), re.MULTILINE)
    found = {name: given for name, given in shown if hasattr(pccl, name)}
    assert {"init", "allreduce", "sync", "Communicator", "MasterNode"} <= set(found)
    for name, given in found.items():
        listed = {part.split("=")[0].strip() for part in re.split(r",(?![^(\[]*[)\]])", given)}
        there = inspect.signature(getattr(pccl, name)).parameters
        if listed != {"..."}:
            assert listed - {"*", ""} == set(there) - {"self"}, name


def test_every_guide_page_is_on_the_start_page() -> None:
    linked = set(re.findall(r"\((guide/[\w-]+\.md)", page("index.md")))
    assert {f"guide/{path.name}" for path in (DOCS / "guide").glob("*.md")} <= linked


def test_every_public_name_has_its_docstring_in_the_generated_reference() -> None:
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = re.findall(r"^::: pccl\.(\w+)$", text, re.MULTILINE)
    assert len(shown) == len(set(shown))
    assert set(shown) - {"_arrays"} == set(pccl.__all__) - {"__version__"}
    for name in shown:
        assert getattr(pccl, name).__doc__, name


@pytest.mark.parametrize(
    "name",
    [
        "Result",
        "ReduceOp",
        "Attribute",
        "DataType",
        "DeviceType",
        "DistributionHint",
        "QuantizationAlgorithm",
        "SharedStateSyncStrategy",
    ],
)
def test_the_migration_page_has_every_value_of_each_enum(name: str) -> None:
    by_name = {
        cells[0].strip("`"): cells[1]
        for cells in rows(page("guide/from-pypccl.md"))
        if len(cells) == 2
    }
    values = [f"{member.name} {member.value}" for member in getattr(pccl, name)]
    assert by_name[name] == ", ".join(values)


def test_every_room_has_its_row() -> None:
    rooms = {path.name for path in (ROOT / "cpp" / "pccl").iterdir() if path.is_dir()}
    assert "state" in rooms
    assert rooms <= {cells[0].strip("`") for cells in rows(architecture())}


def test_the_glossary_has_the_words_of_the_code() -> None:
    words = architecture().partition("## Words")[2].partition("## Invariants")[0]
    named = {cells[0] for cells in rows(words)[2:]}
    assert {"peer", "verdict"} <= named
    assert named <= {cells[0] for cells in rows(page("concepts/glossary.md"))}


def test_the_diagrams_of_phases_have_the_changes_that_the_engine_has() -> None:
    report = _testing.simulate(1, peers=2)
    blocks = re.findall(r"^stateDiagram-v2\n(.*?)^```", architecture(), re.DOTALL | re.MULTILINE)
    drawn = [re.findall(r"^ +(\w+) --> (\w+): (.+)$", block, re.MULTILINE) for block in blocks]
    tables = report["link_transitions"], report["call_transitions"]
    assert drawn == [[row[:3] for row in table] for table in tables]


def test_every_answer_to_where_do_i_find_is_there() -> None:
    answers = re.findall(r"`([\w/]+\.(?:h|cpp))`: `([\w:]+)`(?: and `([\w:]+)`)?", architecture())
    assert len(answers) > 20
    for path, *names in answers:
        for name in filter(None, names):
            call = r"\(" if path.endswith(".cpp") else r"\b"
            assert re.search(rf"\b{name}{call}", source(path)), f"{path}: {name}"


def indexed_decisions() -> list[list[str]]:
    return rows((DECISIONS / "index.md").read_text())[2:]


def test_every_decision_is_in_the_index_and_has_its_three_parts() -> None:
    records = sorted(path for path in DECISIONS.glob("*.md") if path.name != "index.md")
    indexed = indexed_decisions()
    assert [cells[0] for cells in indexed] == [f"[{r.name[:3]}]({r.name})" for r in records]
    for number, (path, cells) in enumerate(zip(records, indexed, strict=True), 1):
        lines = path.read_text().splitlines()
        assert re.fullmatch(rf"{number:03}-[a-z0-9-]+\.md", path.name)
        assert lines[0] == f"# {number:03}: {cells[1]}", path.name
        headings = [line for line in lines if line.startswith("## ")]
        assert headings == ["## Context", "## Decision", "## Consequence"], path.name
        assert len(lines) <= 60, path.name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_on_the_pages_is_python(path: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, path.name, "exec")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target
