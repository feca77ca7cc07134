"""Every kind of state arrives by `pccl.sync`: leaves, containers, and what torch and JAX have."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
from programs import sync_frameworks, sync_leaves, sync_shell
from syncs import (
    add,
    agreed,
    do,
    failed,
    members,
    moved,
    newcomer,
    noise,
    put,
    sync,
    synced,
    tell,
)
from workers import Run

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")


def test_every_kind_of_leaf_and_container_arrives(run: Run) -> None:
    peers = members(run, 2)
    answers = synced(peers, sync_leaves.sync_every_kind)
    assert moved(answers)[0] == 0
    sender, receiver = do(peers, sync_leaves.say_what_arrived)
    assert sender == {
        "kept": True,
        "rest": True,
        "in_place": True,
        "foreign": ">i4",
        "frozen": True,
        "scalars": ["float32", "int8", "bool", "complex64"],
        "order": ["z", "a"],
        "types": ["OrderedDict", "Layer", "Schedule", "bool", "int", "str"],
        "pair": "Pair",
        "schedule": True,
        "loaded": 0,
    }
    assert receiver == {**sender, "loaded": 1}
    assert moved(synced(peers, sync())) == [0, 0]


def test_a_newcomer_receives_entries_that_it_lacks(run: Run) -> None:
    peers = members(run, 1)
    synced(peers, sync_leaves.sync_an_optimizer)
    late = newcomer(run)
    tell(late, sync({"w": noise(9, 10), "optimizer": {"slots": {}}}))
    tell(peers, sync(until=2))
    answers = agreed(peers + late)
    assert answers[1]["received"][:2] == ["['note']", "['optimizer']['betas'][0]"]
    everybody = peers + late
    assert moved(synced(everybody, add("optimizer", "slots", 0, "m"), sync())) == [0, 0]
    # The structure may change when it changes on all.
    change = (put("new", value=1), partial(sync_shell.remove, ["note"]))
    assert moved(synced(everybody, *change, sync())) == [0, 0]


@needs_torch
def test_a_torch_model_and_its_optimizer_arrive_before_the_first_step(run: Run) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, partial(sync_frameworks.train, seed=1, rate=0.01, steps=3), sync())
    tell(late, partial(sync_frameworks.train, seed=2, rate=0.5, steps=0), sync())
    tell(peers, sync(until=2))
    answers = agreed(peers + late)
    assert moved(answers)[0] == 0 and moved(answers)[1] > 0
    assert do(late, sync_frameworks.say_what_arrived) == [
        {
            "objects": True,
            "parameters": True,
            "optimized": True,
            "grads": True,
            "rate": 0.01,
            "slots": 6,
            "step": 3,
        }
    ]
    # They go on alike.
    assert moved(synced(peers + late, sync_frameworks.step, sync())) == [0, 0]
    # Frameworks mix; tensors of any dtype and layout are written in place.
    tell(peers, partial(sync_frameworks.hold_tensors, newcomer=False))
    tell(late, partial(sync_frameworks.hold_tensors, newcomer=True))
    sender, receiver = do(peers + late, sync_frameworks.sync_tensors)
    assert sender == {
        "mixed": True,
        "views": True,
        "tensors": [True] * 4,
        "in_place": True,
        "rx": 0,
    }
    assert receiver == {**sender, "rx": 24 + 24 + 10 + 5 + 40 + 5}


@needs_torch
def test_tied_weights_of_a_torch_model_arrive_once_for_both(run: Run) -> None:
    peers = members(run, 2)
    synced(peers, sync_frameworks.tie_weights, sync())
    assert do(peers, sync_frameworks.say_whether_tied) == [{"tied": True}] * 2
    for transposed in (False, True):
        for answer in do(peers, partial(sync_frameworks.sync_with_a_view, transposed)):
            failed(answer, "InvalidArgument", "INVALID_ARGUMENT")


@needs_jax
def test_jax_arrays_are_replaced_in_the_returned_tree(run: Run) -> None:
    peers, late = members(run, 1), newcomer(run)
    synced(peers, partial(sync_frameworks.sync_jax_arrays, 5))
    tell(late, partial(sync_frameworks.sync_jax_arrays, 0))
    tell(peers, sync(until=2))
    assert moved(agreed(peers + late)) == [0, 24 + 12 + 6 + 48 + 6 + 24]
    assert do(late, partial(sync_frameworks.say_which_jax_arrays, old_seed=0, new_seed=5)) == [
        {"arrays": True, "given": True, "kinds": True, "kept": True, "computes": 51.0}
    ]
