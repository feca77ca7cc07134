"""The recipes of deploy/conda/ and deploy/nix/ agree with pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()


def listed(name: str) -> dict[str, str]:
    """The requirements of that list of pyproject.toml: name and versions."""
    found = re.search(rf"^{name} = (\[.*?\])$", PROJECT, re.MULTILINE)
    assert found
    words = re.findall(r'"([\w-]+)([^"]*)"', found[1])
    assert words
    return {name: versions.strip() for name, versions in words}


def version() -> str:
    found = re.search(r'^version = "(.*)"$', PROJECT, re.MULTILINE)
    assert found
    return found[1]


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_project() -> None:
    yaml = pytest.importorskip("yaml")
    recipe = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == version()
    needed = {
        kind: {name: versions for name, _, versions in (each.partition(" ") for each in lines)}
        for kind, lines in recipe["requirements"].items()
    }
    assert listed("requires").items() <= needed["host"].items()
    assert listed("dependencies").items() <= needed["run"].items()
    pythons = re.search(r'^requires-python = "(.*)"$', PROJECT, re.MULTILINE)
    assert pythons and needed["run"]["python"] == needed["host"]["python"] == pythons[1]


def test_the_nix_expression_has_the_version_and_the_requirements_of_the_project() -> None:
    text = (ROOT / "deploy" / "nix" / "default.nix").read_text()
    pinned = dict(re.findall(r'pname = "([\w-]+)";\s+version = "([\d.]+)";', text))
    assert pinned["pccl-collectives"] == version()
    fixed = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert f"nanobind=={pinned['nanobind']}" in fixed
    assert f"nanobind-backend=={pinned['nanobind_backend']}" in fixed
    main = text[text.index('pname = "pccl-collectives"') :]
    for kind, names in (
        ("build-system", listed("requires")),
        ("dependencies", listed("dependencies")),
    ):
        found = re.search(rf"{kind} = \[(.*?)\];", main, re.DOTALL)
        assert found
        assert {word.removeprefix("python.") for word in found[1].split()} == names.keys()
