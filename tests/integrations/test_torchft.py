"""torchft's own classes and its example's shape around our Manager, with kills and newcomers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from launches import example, losses, members

torch = pytest.importorskip("torch")

CLASSES = [
    "DistributedDataParallel",
    "PureDistributedDataParallel",
    "ManagedProcessGroup",
    "LocalSGD",
    "DiLoCo",
    "streaming DiLoCo",
]


def reference(batches: Sequence[slice]) -> float:
    """The loss of the example when one process takes these steps."""
    torch.manual_seed(1)
    x = torch.randn(512, 8)
    y = x.sum(1, keepdim=True)
    layers = torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return float(torch.nn.functional.mse_loss(model(x), y).detach())


def weights(output: str) -> list[str]:
    return re.findall(r"^\[\d\] loss \S+ weights (\S+)", output, re.MULTILINE)


# The sampler gives replica r every second example, from the r-th on.
TOGETHER = [slice(32 * (step % 16), 32 * (step % 16) + 32) for step in range(48)]
FIRST_ALONE = [slice(whole.start, whole.stop, 2) for whole in TOGETHER]


def test_the_example_has_the_loss_of_one_process(tmp_path: Path) -> None:
    output = members(example("torchft_ddp"), folder=tmp_path)
    assert losses(output) == pytest.approx([reference(TOGETHER)] * 2, rel=1e-5)
    assert len(set(weights(output))) == 1, output


def test_the_example_goes_on_when_a_member_is_killed_and_loses_no_step(tmp_path: Path) -> None:
    output = members(example("torchft_ddp"), folder=tmp_path, DIES_AT="20")
    assert "rank 1 was ended by SIGKILL; 1 of 2 go on" in output
    want = reference([*TOGETHER[:20], *FIRST_ALONE[20:]])
    assert losses(output) == pytest.approx([want], rel=1e-5)


@pytest.mark.parametrize("which", CLASSES)
def test_a_killed_member_is_started_again_and_heals(which: str, tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("torchft_classes.py"))
    output = members(program, which, "2", folder=tmp_path, restarts=1, DIES_AT="9")
    assert "rank 1 was ended by SIGKILL" in output
    assert re.findall(r"steps (\d+) batches (\d+)$", output, re.MULTILINE) == [("24", "48")] * 2
    assert len(weights(output)) == 2 and len(set(weights(output))) == 1, output
    assert max(losses(output)) < 2, output  # about 8 at the start
