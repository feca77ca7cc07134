"""The manifests of deploy/kubernetes/ are what Kubernetes and pccl take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import pccl
from pccl.tools.cli import parser

kubernetes = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
MANIFESTS = {
    f"{path.stem} {one['kind']}": one
    for path in sorted(FOLDER.glob("*.yaml"))
    for one in yaml.safe_load_all(path.read_text())
}
MASTERS = MANIFESTS["masters StatefulSet"]["spec"]
PEERS = MANIFESTS["peers Job"]["spec"]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return dict(only)


def variables(template: dict[str, Any]) -> dict[str, str]:
    given = container(template)["env"]
    return {one["name"]: one["value"] for one in given if "value" in one}


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_the_fields_of_its_kind(name: str, version: str) -> None:
    kubernetes.validate(MANIFESTS[name], version, strict=True)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_each_master_knows_its_place_by_its_pods_name(place: int, tmp_path: Path) -> None:
    stub = tmp_path / "pccl"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    said = subprocess.run(
        container(MASTERS["template"])["command"],
        env={
            **variables(MASTERS["template"]),
            "HOSTNAME": f"pccl-master-{place - 1}",
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = parser().parse_args(said.splitlines())
    assert options.command == "master"
    assert options.place == place
    assert len(options.peers.split(",")) == MASTERS["replicas"]
    assert options.peers.split(",")[place - 1] == f"pccl-master-{place - 1}.pccl-master:48148"


def test_peers_and_masters_have_the_same_list_and_ports_of_the_service() -> None:
    assert (
        variables(PEERS["template"])["PCCL_MASTER"]
        == (variables(MASTERS["template"])["PCCL_MASTER"])
    )
    service = MANIFESTS["masters Service"]
    assert service["metadata"]["name"] == MASTERS["serviceName"]
    assert service["spec"]["selector"] == MASTERS["template"]["metadata"]["labels"]
    assert [port["port"] for port in service["spec"]["ports"]] == [
        port["containerPort"] for port in container(MASTERS["template"])["ports"]
    ]


def test_a_peer_has_time_to_leave() -> None:
    drain = float(variables(PEERS["template"])["PCCL_DRAIN_SECONDS"])
    assert PEERS["template"]["spec"]["terminationGracePeriodSeconds"] > drain


@pytest.mark.parametrize("template", [MASTERS["template"], PEERS["template"]])
def test_variables_are_settings_with_values_that_they_take(
    template: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = (FOLDER.parent.parent / "docs" / "reference" / "settings.md").read_text()
    for one in container(template)["env"]:
        assert f"`{one['name']}`" in known
        monkeypatch.setenv(one["name"], one.get("value", "a-pods-name"))
    pccl.Communicator("127.0.0.1:48148").close()  # reads them
