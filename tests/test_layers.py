"""The modules of the Python package form layers: their imports have no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules() -> dict[str, Path]:
    """Name -> file of every module; native modules by their stubs."""
    found = {}
    folder = ROOT / "pccl"
    for path in [*folder.rglob("*.py"), *folder.rglob("*.pyi")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "adapters" not in parts:  # a link, in development trees
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports_of(source: str, known: set[str]) -> Iterator[str]:
    """Modules that the source imports anywhere: in functions and for types, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module


def find_circle(imports: dict[str, set[str]]) -> list[str] | None:
    """Modules of which each imports the next one, and the last one the first one."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return None
        for used in sorted(imports[name]):
            circle = walk(used, [*way, name])
            if circle:
                return circle
        done.add(name)
        return None

    return next((circle for name in sorted(imports) if (circle := walk(name, []))), None)


def test_imports_have_no_circle() -> None:
    paths = modules()
    assert {"pccl", "pccl.api", "pccl.reduce.routes", "pccl.training.diloco"} <= set(paths)
    known = set(paths)
    imports = {
        name: set(imports_of(path.read_text(), known)) - {name} for name, path in paths.items()
    }
    assert "pccl.reduce.request" in imports["pccl.communicator"]
    circle = find_circle(imports)
    assert circle is None, " -> ".join([*(circle or ()), (circle or [""])[0]])


@pytest.mark.parametrize(
    ("imports", "circle"),
    [
        ({"a": {"b"}, "b": set()}, None),
        ({"a": {"b"}, "b": {"a"}}, ["a", "b"]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}, ["b", "c", "d"]),
    ],
)
def test_circles_are_found(imports: dict[str, set[str]], circle: list[str] | None) -> None:
    assert find_circle(imports) == circle
