"""What DiLoCo keeps in a checkpoint: copies of state, and whether such copies fit a run."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pccl.training.diloco.options import refused
from pccl.training.diloco.outer import OuterOptimizer


def snapshot(state: Any) -> Any:
    """A copy that later steps do not change."""
    if isinstance(state, Mapping):
        return {key: snapshot(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [snapshot(value) for value in state]
    if hasattr(state, "state_dict"):
        return copy.deepcopy(state.state_dict())
    return state.copy() if isinstance(state, np.ndarray) else copy.deepcopy(state)


def check(
    state: Mapping[str, Any], layout: Mapping[str, Any], optimizers: Sequence[OuterOptimizer]
) -> None:
    """Compares a checkpoint with this peer's layout and outer optimizers.

    Raises:
        InvalidArgument: It does not fit.
    """
    try:
        saved = json.loads(state["layout"])
        theirs, fragments = dict(saved["parameters"]), saved["fragments"]
        every, kept = int(saved["sync_every"]), list(state["optimizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise refused(f"this is no DiLoCo's state: {error!r}") from error
    ours = layout["parameters"]
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "none"), ours.get(name, "none")
            raise refused(
                f"the checkpoint is of other parameters: {name} is {there} there, {here} here"
            )
    if fragments != layout["fragments"]:
        raise refused("the checkpoint is of other fragments")
    if every != layout["sync_every"]:
        raise refused(f"the checkpoint is of sync_every={every}, not {layout['sync_every']}")
    pairs = zip(optimizers, kept, strict=True)
    if not all(_fits(optimizer.state(), one) for optimizer, one in pairs):
        raise refused(
            "the checkpoint is of another outer optimizer, or of one with another momentum"
        )


def _fits(state: Any, saved: Any) -> bool:
    """Whether a snapshot is of such a state, as far as its structure and shapes tell."""
    if hasattr(state, "load_state_dict"):
        return isinstance(saved, Mapping)
    if isinstance(state, np.ndarray):
        return bool(np.shape(saved) == state.shape)
    if isinstance(state, Mapping):
        same = isinstance(saved, Mapping) and state.keys() == saved.keys()
        return same and all(_fits(value, saved[key]) for key, value in state.items())
    if isinstance(state, list | tuple):
        same = isinstance(saved, list | tuple) and len(state) == len(saved)
        return same and all(map(_fits, state, saved))
    return True


def restore(state: Any, saved: Any) -> None:
    """Writes a snapshot back, in place.

    Raises:
        InvalidArgument: The state has changed its entries, or has some that cannot be written.
    """
    if hasattr(state, "load_state_dict"):
        state.load_state_dict(saved)
    elif isinstance(state, np.ndarray):
        state[...] = np.asarray(saved)
    elif isinstance(state, Mapping) and state.keys() == saved.keys():
        for key, value in state.items():
            restore(value, saved[key])
    elif isinstance(state, list | tuple) and len(state) == len(saved):
        for value, kept in zip(state, saved, strict=True):
            restore(value, kept)
    else:
        raise refused(
            "the outer optimizer's state() has something else than arrays and objects with "
            "load_state_dict, or other entries than before"
        )
