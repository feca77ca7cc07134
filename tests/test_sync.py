"""Shared state among real processes: what `pccl.sync` and `sync_shared_state` move, decide, refuse and survive.

Peers are shells here: they run the lines that the test tells them, and say what each sync did.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
from workers import Run, Worker, running, wait_until_asleep

MIB = 1 << 20

# Failure detection in a second instead of six; the ratio between the settings is that of the defaults.
FAST = {
    "PCCL_HEARTBEAT_INTERVAL": "0.2",
    "PCCL_HEARTBEAT_TIMEOUT": "1.5",
    "PCCL_LINK_TIMEOUT": "0.8",
    "PCCL_RECONNECT_TIMEOUT": "2",
}

TOOLS = """
import hashlib

def parts(tree):
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield repr(key).encode()
            yield from parts(tree[key])
    elif isinstance(tree, (list, tuple)):
        yield str(len(tree)).encode()
        for child in tree:
            yield from parts(child)
    elif hasattr(tree, "state_dict"):
        yield from parts(tree.state_dict())
    elif hasattr(tree, "__dataclass_fields__"):
        yield from parts(vars(tree))
    elif tree is None or type(tree) in (bool, int, float, str):
        yield repr(tree).encode()
    else:
        array = np.asarray(tree.detach() if hasattr(tree, "detach") else tree)
        yield f"{array.dtype.name}{array.shape}".encode()
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        yield np.ascontiguousarray(native).reshape(-1).view(np.uint8).data

def digest(tree):
    whole = hashlib.sha256()
    for part in parts(tree):
        whole.update(part)
    return whole.hexdigest()

def noise(seed, count):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)

def failed(error):
    what = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, pccl.PCCLError):
        what.update(result=error.result.name, peer=error.peer, advice=error.advice)
    if isinstance(error, pccl.Deadlock):
        what["waiting"] = list(error.waiting)
    say(event="failed", **what)
"""

# Level 2. `until`: syncs until the group has so many members, or that one; says what these syncs moved and did in all.
SHELL = (
    TOOLS
    + """
def sync(state, until=None, **options):
    tx = rx = 0
    received, diverged = set(), {}
    while True:
        try:
            state, info = pccl.sync(state, return_info=True, **options)
        except (pccl.PCCLError, KeyboardInterrupt) as error:
            failed(error)
            return state
        tx, rx = tx + info.tx_bytes, rx + info.rx_bytes
        received.update(info.received)
        diverged.update(info.diverged)
        if until in (None, info.world_size, *info.peers):
            break
    assert (info.epoch, info.peers) == (pccl.membership().epoch, pccl.membership().peers)
    say(event="synced", digest=digest(state), tx=tx, rx=rx, revision=info.revision, size=info.world_size,
        epoch=info.epoch, received=sorted(received), diverged=diverged, peers=info.peers)
    return state

def join(**options):
    start(**options)
    say(event="in", rank=pccl.rank(), peer=pccl.init_peer)

join()
while True:
    exec(hear(), globals())
"""
)

# Level 1. `share` makes the state, `sync` calls.
SHELL_1 = (
    TOOLS
    + """
def share(revision=0, loose=(), **arrays):
    global state
    infos = [pccl.TensorInfo.from_numpy(array, name, allow_content_inequality=name in loose)
             for name, array in arrays.items()]
    state = pccl.SharedState(infos)
    state.arrays, state.revision = arrays, revision

def sync(strategy="ENFORCE_POPULAR", **options):
    try:
        info = comm.sync_shared_state(state, pccl.SharedStateSyncStrategy[strategy], **options)
    except (pccl.PCCLError, KeyboardInterrupt) as error:
        return failed(error)
    size = comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE)
    say(event="synced", digest=digest(state.arrays), tx=info.tx_bytes, rx=info.rx_bytes, revision=state.revision,
        size=size)

def grow(count):
    while comm.get_attribute(pccl.Attribute.LOCAL_WORLD_SIZE) < count:
        comm.update_topology()

comm = pccl.Communicator(os.environ["PCCL_MASTER"])

def join(count):
    comm.connect()
    grow(count)
    say(event="in", rank=comm._engine.membership()[1], peer=comm._engine.peer_id())

join(int(os.environ["TEST_PEERS"]))
while True:
    exec(hear(), globals())
"""
)

Answer = dict[str, Any]


class Peers(list[Worker]):
    """Peers in rank order, and their ids."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        answers = [worker.expect("in", 60) for worker in workers]
        order = sorted(range(len(workers)), key=lambda index: answers[index]["rank"])
        super().__init__(workers[index] for index in order)
        self.ids: list[str] = [answers[index]["peer"] for index in order]


def members(run: Run, count: int) -> Peers:
    return Peers(run.peers(count, SHELL))


def newcomer(run: Run, count: int = 1) -> Peers:
    """Peers that wait to be let in."""
    return Peers([run.peer(SHELL) for _ in range(count)])


def members_1(run: Run, count: int) -> Peers:
    """Level 1: all of them let each other in."""
    return Peers([run.peer(SHELL_1, TEST_PEERS=str(count)) for _ in range(count)])


def newcomer_1(run: Run, others: Peers) -> Peers:
    """Level 1: the others have let it in."""
    late = run.peer(SHELL_1, TEST_PEERS="1")
    tell(others, f"grow({len(others) + 1})")
    return Peers([late])


def tell(peers: Sequence[Worker], code: str) -> None:
    for peer in peers:
        peer.tell(textwrap.dedent(code))


def do(peers: Sequence[Worker], code: str, timeout: float = 30.0) -> list[Answer]:
    """What each says of the same code."""
    tell(peers, code)
    return [peer.next(timeout) for peer in peers]


def agreed(
    peers: Sequence[Worker], *, timeout: float = 30.0, all_live: bool = True
) -> list[Answer]:
    """What each says of its sync, which left all with the same; what one received, another has sent."""
    answers = [peer.expect("synced", timeout) for peer in peers]
    for key in ("digest", "revision", "size", "epoch", "diverged", "peers"):
        assert all(answer.get(key) == answers[0].get(key) for answer in answers), (key, answers)
    if all_live:
        assert sum(answer["tx"] for answer in answers) == sum(moved(answers))
    return answers


def synced(peers: Sequence[Worker], code: str) -> list[Answer]:
    tell(peers, code)
    return agreed(peers)


def moved(answers: Sequence[Answer]) -> list[int]:
    """Bytes that each received."""
    return [answer["rx"] for answer in answers]


def failed(answer: Answer, kind: str, result: str = "INVALID_USAGE") -> Answer:
    found = (answer["event"], answer.get("kind"), answer.get("result"))
    assert found == ("failed", kind, result), answer
    return answer


def interrupted(answer: Answer) -> None:
    assert (answer["event"], answer.get("kind")) == ("failed", "KeyboardInterrupt"), answer


def meanwhile(late: Worker, peers: Sequence[Worker], *, served: bool = False) -> Answer:
    """What `late` says in the end; the peers go on syncing until then, in step.

    Args:
        late: A newcomer.
        peers: The members.
        served: It may receive something before it is put out.
    """
    for _ in range(2000):
        tell(peers, "state = sync(state)")
        assert moved(agreed(peers, all_live=not served)) == [0] * len(peers)
        try:
            return late.next(0.005)
        except AssertionError as error:
            if "said nothing" not in str(error):
                raise
    raise AssertionError("late said nothing")


# Level 2: who receives what.


def test_founders_end_with_the_state_of_the_longest_standing_one() -> None:
    with running() as run:
        peers = members(run, 3)
        answers = synced(
            peers,
            """
            w = np.full(1000, value(pccl.init_peer))
            given = {"w": w, "n": float(value(pccl.init_peer)), "layers": [np.full(3, pccl.rank(), np.int16), None]}
            state = sync(given)
            """,
        )
        assert moved(answers) == [0, 8014, 8014]
        assert [answer["revision"] for answer in answers] == [0, 0, 0]
        assert answers[0]["received"] == []
        assert answers[1]["received"] == ["['layers'][0]", "['n']", "['w']"]
        assert answers[0]["diverged"] == {}
        held = do(
            peers,
            "say(w=int(state['w'][0]), n=state['n'], same=state['w'] is w, all=state is given)",
        )
        first = int(peers.ids[0][:6], 16)
        assert held[0] == {"w": first, "n": first, "same": True, "all": True}
        assert held[1] == held[2] == {"w": first, "n": first, "same": True, "all": False}
        again = synced(peers, "given = state; state = sync(state)")
        assert moved(again) == [0, 0, 0]
        assert again[0]["revision"] == 1
        assert all(answer["all"] for answer in do(peers, "say(all=state is given)"))


def test_a_newcomer_receives_everything_and_members_in_step_move_nothing() -> None:
    with running() as run:
        peers = members(run, 2)
        synced(peers, "state = sync({'w': noise(1, (3 << 20) + 1), 'step': 7})")
        late = newcomer(run)
        tell(late, "state = sync({'w': noise(2, (3 << 20) + 1), 'step': 0})")
        tell(peers, "state = sync(state, until=3)")
        answers = agreed(peers + late)
        assert moved(answers) == [0, 0, 3 * MIB + 2]
        assert answers[2]["received"] == ["['step']", "['w']"]
        assert answers[2]["peers"] == peers.ids + late.ids
        assert answers[0]["diverged"] == {}
        assert do(
            late,
            "say(ok=bool((state['w'] == noise(1, (3 << 20) + 1)).all()) and state['step'] == 7)",
        ) == [{"ok": True}]
        assert moved(synced(peers + late, "state['step'] += 1; state = sync(state)")) == [0, 0, 0]


def test_several_newcomers_at_once_receive_from_several_holders() -> None:
    with running() as run:
        peers = members(run, 2)
        synced(peers, "state = sync(noise(1, (20 << 20) + 1))")
        late = newcomer(run, 3)
        tell(late, "state = sync(np.zeros((20 << 20) + 1, np.uint8), until=5)")
        tell(peers, "state = sync(state, until=5)")
        answers = agreed(peers + late)
        assert moved(answers) == [0, 0] + [20 * MIB + 1] * 3
        assert all(answer["tx"] > 0 for answer in answers[:2])


@pytest.mark.parametrize("members_call", ["admit", "sync"])
def test_newcomers_enter_by_admit_or_by_sync_wherever_the_members_are(members_call: str) -> None:
    with running() as run:
        peers = members(run, 2)
        synced(peers, "state = sync(noise(1, 1000))")
        everybody = list(peers)
        for first_call in ("", "assert pccl.admit()"):
            late = newcomer(run)
            tell(late, f"{first_call}; state = sync(noise(2, 1000))".lstrip("; "))
            if members_call == "admit":
                tell(everybody, "while not pccl.admit(): pass")
            tell(everybody, f"state = sync(state, until={late.ids[0]!r})")
            everybody += late
            assert moved(agreed(everybody)) == [0] * (len(everybody) - 1) + [1000]
            # From here on their calls meet.
            assert do(everybody, "say(total=pccl.allreduce(1), let_in=pccl.admit())") == [
                {"total": len(everybody), "let_in": False}
            ] * len(everybody)
            assert moved(synced(everybody, "state = sync(state)")) == [0] * len(everybody)


def test_a_training_loop_of_sync_and_reductions_takes_newcomers_in() -> None:
    loop = """
    works, ok = [], True
    while True:
        state, info = pccl.sync(state, return_info=True)  # first completes what is in flight
        for work in works:
            ok = ok and bool((work.wait() == expected(work.info)).all())
        total, reduced = pccl.allreduce(x(1000), return_info=True)
        ok = ok and bool((total == expected(reduced)).all()) and reduced.contributors == info.peers
        state["w"] += total
        state["step"] += 1
        if info.world_size == 4:
            break
        works = [pccl.allreduce_async(x(70_000), tag=tag) for tag in range(3)] + [pccl.allreduce_async(x(10))]
    state = sync(state)
    say(event="after", ok=ok, step=state["step"])
    """
    with running() as run:
        peers = members(run, 2)
        tell(peers, "state = {'w': np.zeros(1000, np.int64), 'step': 0}" + textwrap.dedent(loop))
        late = newcomer(run, 2)
        tell(late, "state = {'w': np.ones(1000, np.int64), 'step': -9}" + textwrap.dedent(loop))
        everybody = peers + late
        assert moved(agreed(everybody)) == [0] * 4
        after = [peer.expect("after") for peer in everybody]
        assert all(answer["ok"] for answer in after)
        assert after[0]["step"] > 1


def test_a_newcomer_never_overwrites_a_member() -> None:
    with running() as run:
        peers = members(run, 1)
        first = synced(peers, "state = sync({'w': noise(1, 1000)})")
        late = newcomer(run, 1)
        tell(late, "state = sync({'w': noise(2, 1000)})")
        tell(peers, "state = sync(state, until=2)")
        answers = agreed(peers + late)
        assert answers[0]["digest"] == first[0]["digest"]
        assert moved(answers) == [0, 1000]


def test_many_newcomers_that_agree_do_not_outvote_a_member() -> None:
    with running() as run:
        peers = members(run, 1)
        first = synced(peers, "state = sync({'w': noise(1, 1000)})")
        late = newcomer(run, 3)
        tell(late, "state = sync({'w': noise(2, 1000)}, until=4)")
        tell(peers, "state = sync(state, until=4)")
        answers = agreed(peers + late)
        assert answers[0]["digest"] == first[0]["digest"]
        assert moved(answers) == [0, 1000, 1000, 1000]
        assert answers[0]["diverged"] == {}


def test_a_member_that_worked_before_the_first_sync_is_not_outvoted_by_newcomers() -> None:
    with running() as run:
        peers = members(run, 1)
        do(peers, "w = np.full(1000, 7)\nfor _ in range(3): pccl.allreduce(w)\nsay(v=1)")
        late = newcomer(run, 2)
        tell(late, "state = sync({'w': np.zeros(1000, int)}, until=3)")
        tell(peers, "import time; time.sleep(0.5); state = sync({'w': w, 'm': 1}, until=3)")
        assert moved(agreed(peers + late)) == [0, 8001, 8001]
        assert do(peers + late, "say(w=int(state['w'][0]))") == [{"w": 7}] * 3


def test_founders_that_worked_together_before_their_first_sync_are_equal() -> None:
    with running() as run:
        peers = members(run, 3)
        tell(peers, "total = pccl.allreduce(1)")
        tell(peers, "state = sync({'w': np.full(100, min(pccl.rank(), 1))})")
        assert moved(agreed(peers)) == [800, 0, 0]


def test_level_1_a_pair_that_worked_is_not_outvoted_by_newcomers_in_its_first_sync() -> None:
    with running() as run:
        peers = members_1(run, 2)
        tell(peers, "a = np.ones(10); comm.all_reduce(a, np.zeros(10), op='sum')")
        late = [run.peer(SHELL_1, TEST_PEERS="5") for _ in range(3)]
        tell(peers, "grow(5)")
        for worker in late:
            worker.expect("in")
        tell(late, "share(w=np.zeros(100)); sync()")
        tell(peers, "share(w=np.ones(100)); sync()")
        assert moved(agreed([*peers, *late])) == [0, 0, 800, 800, 800]


def test_the_majority_wins_among_members_and_all_hear_who_had_diverged() -> None:
    with running() as run:
        peers = members(run, 3)
        first = synced(peers, "state = sync({'b': noise(1, 10), 'w': noise(2, 5000)})")
        tell(peers[:1], "state['w'][5] ^= 1")
        answers = synced(peers, "state = sync(state)")
        assert answers[0]["digest"] == first[0]["digest"]
        assert moved(answers) == [5000, 0, 0]
        assert answers[0]["diverged"] == {peers.ids[0]: ["['w']"]}
        # Three contents: the longest-standing member's counts.
        tell(peers[1:2], "state['w'][5] ^= 1")
        tell(peers[2:], "state['b'][0] ^= 1; state['w'][0] ^= 1")
        answers = synced(peers, "state = sync(state)")
        assert answers[0]["digest"] == first[0]["digest"]
        assert moved(answers) == [0, 5000, 5010]
        assert answers[0]["diverged"] == {peers.ids[1]: ["['w']"], peers.ids[2]: ["['b']", "['w']"]}
        assert synced(peers, "state = sync(state)")[0]["diverged"] == {}


def test_only_chunks_that_differ_move() -> None:
    with running() as run:
        peers = members(run, 3)
        tell(peers, "state = {'small': noise(1, 100), 'w': noise(2, (5 << 20) + 3)}")
        tell(peers[1:2], "state['w'][(2 << 20) + 5] ^= 1")
        tell(peers[2:], "state['w'][-1] ^= 1; state['small'][0] ^= 1")
        answers = synced(peers, "state = sync(state)")
        assert moved(answers) == [0, MIB, 103]
        assert answers[2]["received"] == ["['small']", "['w']"]
        # Also where the array itself cannot be written.
        tell(
            peers[1:2],
            "w = state['w']; w[:2 << 20] += 1; w.flags.writeable = False; kept = w.copy()",
        )
        assert moved(synced(peers, "state = sync(state)")) == [0, 2 * MIB, 0]
        assert do(peers[1:2], "say(kept=bool((w == kept).all()), new=state['w'] is not w)") == [
            {"kept": True, "new": True}
        ]


def test_a_run_resumes_at_the_highest_revision_offered() -> None:
    with running() as run:
        peers = members(run, 3)
        for peer, revision in zip(peers, ("5", "9", "None"), strict=True):
            tell([peer], f"state = sync(noise(pccl.rank(), 1000), revision={revision})")
        answers = agreed(peers)
        assert moved(answers) == [1000, 0, 1000]
        assert answers[0]["revision"] == 9
        assert answers[0]["diverged"] == {}
        assert synced(peers, "state = sync(state)")[0]["revision"] == 10
        # A checkpoint that the run has left behind is no reason to be refused.
        late = newcomer(run)
        tell(late, "state = sync(noise(7, 1000), revision=10)")
        tell(peers, "state = sync(state, until=4)")
        assert moved(agreed(peers + late)) == [0, 0, 0, 1000]


def test_a_newcomer_ahead_of_the_run_is_refused_and_the_members_go_on() -> None:
    with running() as run:
        peers = members(run, 2)
        synced(peers, "state = sync(noise(1, 1000))")
        late = newcomer(run)
        tell(late, "state = sync(noise(2, 1000), revision=1_000_000)")
        told = failed(meanwhile(late[0], peers), "RevisionMismatch")
        assert told["advice"] == "fix"
        assert "1000000" in told["text"]
        assert do(late, "say(kept=bool((state == noise(2, 1000)).all()))") == [{"kept": True}]
        assert synced(peers, "state = sync(state)")[0]["size"] == 2
        # In the same process, as a newcomer that asks for nothing.
        tell(late, "pccl.shutdown(); join()")
        late = Peers(late)
        tell(late, "state = sync(state)")
        tell(peers, "state = sync(state, until=3)")
        assert moved(agreed(peers + late)) == [0, 0, 1000]


# Level 2: leaves and containers.


def test_every_kind_of_leaf_and_container_arrives() -> None:
    make = """
    import dataclasses
    from collections import OrderedDict, namedtuple

    Pair = namedtuple("Pair", ["first", "second"])

    @dataclasses.dataclass
    class Layer:
        weight: object
        bias: object = None

    class Schedule:
        def __init__(self, rng, seed):
            self.rate, self.history, self.loaded = float(seed), rng.standard_normal(9), 0

        def state_dict(self):
            return {"rate": self.rate, "history": self.history, "warm": None}

        def load_state_dict(self, state):
            self.rate, self.history, self.loaded = state["rate"], state["history"], self.loaded + 1

    def make(seed):
        rng = np.random.default_rng(seed)
        wide = rng.standard_normal((6, 8))
        frozen = rng.standard_normal(5)
        frozen.flags.writeable = False
        dtypes = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "M8[s]", "m8[ms]"]
        kept = {
            "dtypes": [(rng.integers(0, 100, (3, 5)) > 50 if kind == "?" else rng.integers(0, 100, (3, 5)).astype(kind))
                       for kind in dtypes],
            "strided": wide[::2, ::3],
            "reversed": rng.standard_normal(9)[::-1],
            "fortran": np.asfortranarray(wide),
            "0-d": np.array(seed + 0.5),
            "empty": np.empty((3, 0)),
            "big-endian": rng.integers(0, 1000, 5).astype(">i4"),
            "text": np.array(["a" * seed, "bc"], "U9"),
        }
        rest = {
            "frozen": frozen,
            "broadcast": np.broadcast_to(np.float32(seed), (2, 3)),
            "scalars": (np.float32(seed), np.int8(seed), np.bool_(seed == 1), np.complex64(seed)),
            "int": -seed * 10**30, "float": -0.1 * seed, "bool": seed == 1, "str": chr(0x20ac) * seed, "none": None,
            "by number": {3: seed, -1: [seed, (seed, [])]},
            "ordered": OrderedDict(z=seed, a=Pair(seed, rng.standard_normal(2))),
            "layer": Layer(rng.standard_normal(3)),
            "schedule": Schedule(rng, seed),
            "nothing": {},
        }
        return kept, rest
    """
    with running() as run:
        peers = members(run, 2)
        tell(peers, make)
        answers = synced(peers, "given = make(pccl.rank() + 1); state = sync(list(given))")
        assert moved(answers)[0] == 0
        check = """
        (kept, rest), (old_kept, old_rest) = state, given
        wanted = make(1)
        same = lambda a, b: digest(a) == digest(b)
        leaves = lambda tree: [*tree["dtypes"], *(tree[key] for key in sorted(tree) if key != "dtypes")]
        say(
            kept=same(kept, wanted[0]),
            rest=same(rest, wanted[1]),
            in_place=all(a is b for a, b in zip(leaves(kept), leaves(old_kept), strict=True)),
            foreign=kept["big-endian"].dtype.str,
            frozen=same(old_rest["frozen"], make(pccl.rank() + 1)[1]["frozen"]),
            scalars=[type(scalar).__name__ for scalar in rest["scalars"]],
            order=list(rest["ordered"]),
            types=[type(rest[key]).__name__ for key in ("ordered", "layer", "schedule", "bool", "int", "str")],
            pair=type(rest["ordered"]["a"]).__name__,
            schedule=rest["schedule"] is old_rest["schedule"],
            loaded=rest["schedule"].loaded,
        )
        """
        sender, receiver = do(peers, check)
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
        assert moved(synced(peers, "state = sync(state)")) == [0, 0]


def test_a_newcomer_receives_entries_that_it_lacks() -> None:
    with running() as run:
        peers = members(run, 1)
        synced(
            peers,
            """
            slots = {0: {"m": noise(1, 2000), "step": 3}, 2: {"m": noise(2, 10), "step": 4}}
            state = sync({"w": noise(3, 10), "optimizer": {"slots": slots, "betas": [0.9, (0.99, "x")]}, "note": "a"})
            """,
        )
        late = newcomer(run)
        tell(late, "state = sync({'w': noise(9, 10), 'optimizer': {'slots': {}}})")
        tell(peers, "state = sync(state, until=2)")
        answers = agreed(peers + late)
        assert answers[1]["received"][:2] == ["['note']", "['optimizer']['betas'][0]"]
        everybody = peers + late
        assert moved(
            synced(everybody, "state['optimizer']['slots'][0]['m'] += 1; state = sync(state)")
        ) == [0, 0]
        # The structure may change when it changes on all.
        assert moved(
            synced(everybody, "state['new'] = 1; del state['note']; state = sync(state)")
        ) == [0, 0]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_torch_model_and_its_optimizer_arrive_before_the_first_step() -> None:
    make = """
    import types
    import torch

    # Optimizers would import the compiler, which takes longer than all of this test, to say that they are not for it.
    torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
    torch._dynamo.disable = lambda function, *_, **__: function
    torch._dynamo.graph_break = lambda *_, **__: None

    def training(seed, rate):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 1))
        return {"model": model, "adam": torch.optim.Adam(model.parameters(), lr=rate, amsgrad=True), "step": 0}

    def step(state):
        rows = torch.linspace(-1, 1, 40).reshape(4, 10)
        state["adam"].zero_grad()
        (state["model"](rows) ** 2).sum().backward()
        state["adam"].step()
        state["step"] += 1
    """
    with running() as run:
        peers, late = members(run, 1), newcomer(run)
        tell(peers + late, make)
        tell(peers, "state = training(1, 0.01)\nfor _ in range(3): step(state)")
        synced(peers, "state = sync(state)")
        tell(late, "mine = training(2, 0.5); kept = list(mine['model'].parameters())")
        tell(late, "state = sync(mine)")
        tell(peers, "state = sync(state, until=2)")
        answers = agreed(peers + late)
        assert moved(answers)[0] == 0 and moved(answers)[1] > 0
        assert do(
            late,
            """
            parameters = list(state["model"].parameters())
            say(
                objects=state["model"] is mine["model"] and state["adam"] is mine["adam"],
                parameters=all(a is b for a, b in zip(parameters, kept, strict=True)),
                optimized=all(a is b for a, b in zip(state["adam"].param_groups[0]["params"], kept, strict=True)),
                grads=all(parameter.requires_grad for parameter in parameters),
                rate=state["adam"].param_groups[0]["lr"],
                slots=len(state["adam"].state),
                step=state["step"],
            )
            """,
        ) == [
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
        assert moved(synced(peers + late, "step(state); state = sync(state)")) == [0, 0]
        # Frameworks mix; tensors of any dtype and layout are written in place.
        tell(
            peers,
            """
            values = np.arange(6, dtype=np.float32).reshape(2, 3)
            tensors = [torch.arange(5).to(kind) for kind in (torch.bfloat16, torch.bool, torch.complex64, torch.int8)]
            given = {"mixed": values, "views": torch.arange(6.0).reshape(2, 3), "tensors": tensors}
            """,
        )
        tell(
            late,
            """
            tensors = [torch.zeros(5).to(kind) for kind in (torch.bfloat16, torch.bool, torch.complex64, torch.int8)]
            given = {"mixed": torch.zeros(2, 3), "views": torch.zeros(3, 2).T, "tensors": tensors}
            """,
        )
        checks = """
        state, info = pccl.sync(given, return_info=True)
        wanted = torch.arange(6.0).reshape(2, 3)
        say(
            mixed=bool((torch.as_tensor(state["mixed"]) == wanted).all()),
            views=bool((state["views"] == wanted).all()),
            tensors=[bool((tensor == torch.arange(5).to(tensor.dtype)).all()) for tensor in state["tensors"]],
            in_place=state["views"] is given["views"] and all(map(lambda a, b: a is b, state["tensors"], tensors)),
            rx=info.rx_bytes,
        )
        """
        sender, receiver = do(peers + late, checks)
        assert sender == {
            "mixed": True,
            "views": True,
            "tensors": [True] * 4,
            "in_place": True,
            "rx": 0,
        }
        assert receiver == {**sender, "rx": 24 + 24 + 10 + 5 + 40 + 5}


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
def test_jax_arrays_are_replaced_in_the_returned_tree() -> None:
    make = """
    import jax
    import jax.numpy as jnp

    def make(seed):
        kinds = (jnp.float32, jnp.bfloat16, jnp.bool_, jnp.complex64, jnp.int8)
        arrays = [jnp.arange(seed, seed + 6).reshape(2, 3).astype(kind) for kind in kinds]
        return {"arrays": arrays, "same": jnp.ones(4), "n": np.full(3, seed)}
    """
    with running() as run:
        peers, late = members(run, 1), newcomer(run)
        tell(peers + late, make)
        synced(peers, "state = sync(make(5))")
        tell(late, "given = make(0); state = sync(given)")
        tell(peers, "state = sync(state, until=2)")
        assert moved(agreed(peers + late)) == [0, 24 + 12 + 6 + 48 + 6 + 24]
        assert do(
            late,
            """
            old, new = make(0), make(5)
            say(
                arrays=all(bool((a == b).all()) and a.dtype == b.dtype for a, b in zip(state["arrays"], new["arrays"])),
                given=all(bool((a == b).all()) for a, b in zip(given["arrays"], old["arrays"])),
                kinds=all(isinstance(array, jax.Array) for array in state["arrays"]),
                kept=state["same"] is given["same"] and state["n"] is given["n"],
                computes=float((state["arrays"][0] + 1).sum()),
            )
            """,
        ) == [{"arrays": True, "given": True, "kinds": True, "kept": True, "computes": 51.0}]


# Level 2: calls that do not fit.

USUAL = "{'n': 1, 'w': np.zeros(3)}"
ODD = [
    ("{'n': 1, 'w': np.zeros(4)}", "['w']"),
    ("{'n': 1, 'w': np.zeros((3, 1))}", "['w']"),
    ("{'n': 1, 'w': np.zeros(3, np.float32)}", "['w']"),
    ("{'n': 1.0, 'w': np.zeros(3)}", "['n']"),
    ("{'n': 1, 'v': 0, 'w': np.zeros(3)}", "['v']"),
    ("{'n': 1, 'w': [np.zeros(3)]}", "['w']"),
]


def test_members_whose_states_differ_in_structure_all_get_the_same_error() -> None:
    with running() as run:
        peers = members(run, 3)

        def disagree(odd_one: int, odd: str, key: str) -> None:
            for rank, peer in enumerate(peers):
                tell([peer], f"given = {odd if rank == odd_one else USUAL}; state = sync(given)")
            told = [failed(peer.next(), "MismatchedCall") for peer in peers]
            assert len({answer["text"] for answer in told}) == 1
            assert {answer["peer"] for answer in told} == {peers.ids[odd_one]}
            assert key in told[0]["text"] and peers.ids[odd_one][:8] in told[0]["text"]

        missing = ("{'n': 1}", "['w']")
        for odd, key in (*ODD, missing):
            disagree(1, odd, key)
        assert moved(synced(peers, f"state = sync({USUAL})")) == [0, 0, 0]
        for odd, key in (ODD[0], missing):
            disagree(0, odd, key)
        assert moved(synced(peers, f"state = sync({USUAL})")) == [0, 0, 0]


def test_a_newcomer_whose_state_does_not_fit_is_refused_and_may_come_again() -> None:
    with running() as run:
        peers = members(run, 2)
        synced(peers, f"state = sync({USUAL})")
        late = newcomer(run)
        for odd, key in ODD:
            tell(late, f"state = sync({odd})")
            told = failed(meanwhile(late[0], peers), "MismatchedCall")
            assert told["advice"] == "fix"
            assert key in told["text"] and late.ids[0][:8] in told["text"]
            tell(late, "pccl.shutdown(); join()")
            late = Peers(late)
        tell(late, "state = sync({'n': 5, 'w': np.ones(3)})")
        tell(peers, "state = sync(state, until=3)")
        assert moved(agreed(peers + late)) == [0, 0, 25]


SHARING = """
w = np.arange(8.)
given = {
    "apart": {"a": w.copy(), "b": w.copy()},
    "tied": {"a": w, "b": w},
    "tied views": {"a": w[::2], "b": w[::2]},
    "overlapping": {"a": w[:5], "b": w[4:]},
    "reversed": {"a": w, "b": w[::-1]},
    "reshaped": {"a": w.reshape(2, 4), "b": w.reshape(4, 2)},
    "interleaved": {"a": w[::2], "b": w[1::2]},
    "beside a read-only view": {"a": w, "b": np.frombuffer(memoryview(w).toreadonly())},
}
"""


def test_a_state_whose_entries_overlap_is_refused_on_all_members_alike() -> None:
    with running() as run:
        peers = members(run, 3)
        tell(peers, SHARING)

        def refused(rank: int | None, form: str, other: str) -> None:
            for at, peer in enumerate(peers):
                own = form if rank in (None, at) else other
                tell([peer], f"state = sync(given[{own!r}])")
            told = [failed(peer.next(), "InvalidArgument", "INVALID_ARGUMENT") for peer in peers]
            assert len({answer["text"] for answer in told}) == 1
            assert {answer["peer"] for answer in told} == {peers.ids[rank or 0]}
            assert "['a'] and ['b'] share memory" in told[0]["text"]
            assert peers.ids[rank or 0][:8] in told[0]["text"]

        for form in ("overlapping", "reversed", "reshaped", "beside a read-only view"):
            refused(None, form, form)
        for rank in range(3):
            refused(rank, "reversed", "tied")
        for form in ("interleaved", "tied", "tied views"):
            assert moved(synced(peers, f"state = sync(given[{form!r}])")) == [0, 0, 0], form


def test_entries_are_one_memory_on_all_members_or_on_none() -> None:
    with running() as run:
        peers = members(run, 3)
        tell(peers, SHARING)
        for odd, usual in (("tied", "apart"), ("apart", "tied")):
            for rank, peer in enumerate(peers):
                tell([peer], f"state = sync(given[{odd if rank == 1 else usual!r}])")
            told = [failed(peer.next(), "MismatchedCall") for peer in peers]
            assert {answer["peer"] for answer in told} == {peers.ids[1]}
            assert "['b']" in told[0]["text"]
            assert "the same memory as ['a']" in told[0]["text"]
        assert moved(synced(peers, "state = sync(given['tied'])")) == [0, 0, 0]
        tell(peers, "state['a'] += pccl.rank() == 2")  # both of them
        answers = synced(peers, "state = sync(state)")
        assert moved(answers) == [0, 0, 128]
        assert answers[2]["received"] == ["['a']", "['b']"]


def test_a_newcomer_whose_entries_overlap_is_put_out_and_the_members_go_on() -> None:
    with running() as run:
        peers = members(run, 2)
        tell(peers, SHARING)
        synced(peers, "state = sync(given['tied'])")
        late = newcomer(run)
        tell(late, SHARING)
        for form, kind, result in (
            ("overlapping", "InvalidArgument", "INVALID_ARGUMENT"),
            ("apart", "MismatchedCall", "INVALID_USAGE"),
        ):
            tell(late, f"state = sync(given[{form!r}])")
            told = failed(meanwhile(late[0], peers), kind, result)
            assert "memory" in told["text"] and late.ids[0][:8] in told["text"]
            tell(late, "pccl.shutdown(); join()")
            late = Peers(late)
        # One that lacks a half would make it apart.
        tell(late, "state = sync({'a': np.zeros(8)})")
        assert "['b']" in failed(meanwhile(late[0], peers), "MismatchedCall")["text"]
        tell(late, "pccl.shutdown(); join(); w[:] = 9; state = sync(given['tied'])")
        late = Peers(late)
        tell(peers, "state = sync(state, until=3)")
        assert moved(agreed(peers + late)) == [0, 0, 128]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_tied_weights_of_a_torch_model_arrive_once_for_both() -> None:
    make = """
    import torch
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
    torch.manual_seed(pccl.rank())
    model = Tied()
    """
    with running() as run:
        peers = members(run, 2)
        tell(peers, make)
        synced(peers, "state = sync({'model': model})")
        assert (
            do(peers, "say(tied=model.head.weight is model.embed.weight)") == [{"tied": True}] * 2
        )
        overlapping = "model.embed.weight[:3]", "model.embed.weight.data.T"
        for view in overlapping:
            for answer in do(peers, f"sync({{'model': model, 'view': {view}}})"):
                failed(answer, "InvalidArgument", "INVALID_ARGUMENT")


# (the run's state, a newcomer's, what the error says)
UNFIT = [
    ("{'m': np.ones(5), 'z': 1}", "{'m': {}, 'z': 0}", "['m']"),
    ("np.ones(5)", "{}", "a dict in its place"),
    ("{'opt': Keeper({'w': 1}), 'z': 1}", "{'z': 0}", "an object with a state dict"),
    ("{'m': {'x': 1}}", "{'m': []}", "a list"),
]


@pytest.mark.parametrize(("state", "unfit", "why"), UNFIT)
def test_a_newcomer_that_cannot_take_the_state_over_is_put_out_and_the_others_go_on(
    state: str, unfit: str, why: str
) -> None:
    keeper = """
    class Keeper:
        def __init__(self, kept): self.kept = kept
        def state_dict(self): return self.kept
        def load_state_dict(self, kept): self.kept = kept
    """
    with running() as run:
        peers, late = members(run, 2), newcomer(run)
        tell(peers + late, keeper)
        synced(peers, f"state = sync({state})")
        tell(late, f"given = {unfit}; before = digest(given); state = sync(given)")
        told = failed(meanwhile(late[0], peers, served=True), "MismatchedCall")
        assert why in told["text"] and told["peer"] == late.ids[0] and told["advice"] == "fix"
        assert do(late, "say(same=digest(given) == before)") == [{"same": True}]
        assert synced(peers, "state = sync(state)")[0]["size"] == 2
        # In the same process, with one that fits.
        tell(late, f"pccl.shutdown(); join(); state = sync({state})")
        late[0].expect("in")
        tell(peers, "state = sync(state, until=3)")
        agreed(peers + late)


@pytest.mark.skipif(importlib.util.find_spec("ml_dtypes") is None, reason="needs ml_dtypes")
def test_a_newcomer_that_knows_no_such_dtype_is_put_out_before_anything_is_written() -> None:
    with running() as run:
        peers, late = members(run, 1), newcomer(run)
        tell(peers, "import ml_dtypes")
        synced(peers, "state = sync({'a': np.ones(5), 'z': np.ones(3, ml_dtypes.bfloat16)})")
        tell(late, "sys.modules['ml_dtypes'] = None; given = {'a': np.zeros(5)}; sync(given)")
        told = failed(meanwhile(late[0], peers, served=True), "MismatchedCall")
        assert "['z']" in told["text"] and "install ml_dtypes" in told["text"]
        assert do(late, "say(a=given['a'].tolist())") == [{"a": [0.0] * 5}]
        assert synced(peers, "state = sync(state)")[0]["size"] == 1


def test_a_peer_that_fails_to_load_a_state_counts_as_a_newcomer_in_the_next_sync() -> None:
    make = """
    class Keeper:
        broken = False
        def __init__(self, kept): self.kept = kept
        def state_dict(self): return self.kept
        def load_state_dict(self, kept):
            if self.broken: raise RuntimeError("does not load")
            self.kept = kept

    def attempt(given):
        try:
            pccl.sync(given)
            say(event="loaded")
        except RuntimeError as error:
            say(event="broken", text=str(error))
    """
    with running() as run:
        peers, late = members(run, 2), newcomer(run)
        tell(peers + late, make)
        synced(peers, "state = sync({'k': Keeper({'n': 1, 'm': 2}), 'w': np.ones(9)})")
        tell(late, "given = {'k': Keeper({'n': 0}), 'w': np.zeros(9)}; given['k'].broken = True")
        for _ in range(2):  # it lacks 'm' still, and nobody else is harmed
            tell(late, "attempt(given)")
            tell(peers, f"state = sync(state, until={late.ids[0]!r})")
            told = [peer.expect("synced") for peer in peers]
            assert [answer["diverged"] for answer in told] == [{}, {}]
            assert late[0].expect("broken")["text"] == "does not load"
        tell(late, "given['k'].broken = False; given = sync(given)")
        tell(peers, "state = sync(state)")
        assert agreed(peers + late)[0]["size"] == 3
        # From here on it is a member as any other.
        tell(late, "given['w'][0] = 5; given = sync(given)")
        tell(peers, "state = sync(state)")
        assert agreed(peers + late)[0]["diverged"] == {late.ids[0]: ["['w']"]}


def test_a_newcomer_without_memory_for_the_state_is_put_out_and_the_others_go_on() -> None:
    with running() as run:
        peers, late = members(run, 2), newcomer(run)
        synced(peers, "state = sync({'a': np.ones(1 << 26), 'z': 1})")
        tell(
            late,
            """
            import resource
            used = int(open("/proc/self/statm").read().split()[0]) * 4096
            resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
            state = sync({"z": 0})
            """,
        )
        told = failed(meanwhile(late[0], peers, served=True), "InternalError", "INTERNAL_ERROR")
        assert "no memory" in told["text"]
        assert synced(peers, "state = sync(state)")[0]["size"] == 2


def test_the_error_of_a_refused_newcomer_says_that_it_is_the_odd_one() -> None:
    with running() as run:
        peers = members(run, 1)
        synced(peers, "state = sync(np.zeros(3))")
        late = newcomer(run)
        tell(late, "state = sync(np.zeros(4))")
        assert failed(meanwhile(late[0], peers), "MismatchedCall")["peer"] == late.ids[0]


def test_the_odd_one_is_named_also_where_its_bytes_are_those_of_the_others() -> None:
    with running() as run:
        peers = members(run, 3)
        tell(peers[:1], "state = sync({'w': np.zeros((3, 1))})")
        tell(peers[1:], "state = sync({'w': np.zeros(3)})")
        told = [failed(peer.next(), "MismatchedCall") for peer in peers]
        assert {answer["peer"] for answer in told} == {peers.ids[0]}


def test_a_bad_argument_is_an_error_of_this_member_alone() -> None:
    with running() as run:
        peers = members(run, 2)
        tell(peers[1:], "state = sync(np.ones(3))")
        for code, hint in (
            ("pccl.sync({'a': [np.zeros(3), object()]})", "['a'][1]"),
            ("pccl.sync({'a': np.array([object()])})", "['a']"),
            ("pccl.sync({'a': np.zeros(3, [('x', 'f4')])})", "['a']"),
            ("pccl.sync(np.zeros(3), revision=-1)", "revision"),
            ("pccl.sync(np.zeros(3), progress=3)", "progress"),
            ("pccl.sync(np.zeros(3), timeout=-1)", "timeout"),
            ("loop = []; loop.append(loop); pccl.sync(loop)", "nested"),
        ):
            told = do(peers[:1], f"try: {code}\nexcept pccl.PCCLError as error: failed(error)")
            failed(told[0], "InvalidArgument", "INVALID_ARGUMENT")
            assert hint in told[0]["text"]
        tell(peers[:1], "state = sync(np.zeros(3))")
        assert moved(agreed(peers)) == [0, 24]


def test_sync_needs_a_run() -> None:
    code = """
    try:
        pccl.sync(np.zeros(3))
    except pccl.NotInitialized as error:
        say(event="failed", result=error.result.name)
    """
    with running() as run:
        assert run.peer(code).expect("failed")["result"] == "NOT_INITIALIZED"


def test_alone_everything_is_in_step() -> None:
    with running() as run:
        peers = members(run, 1)
        tell(peers, "given = {'w': np.ones(3)}; state = given")
        for revision in range(3):
            (answer,) = synced(peers, "state = sync(state)")
            assert (answer["revision"], answer["size"]) == (revision, 1)
            assert (answer["tx"], answer["rx"], answer["received"]) == (0, 0, [])
        assert do(peers, "say(same=state is given)") == [{"same": True}]


# Level 2: who is lost, or gives up, meanwhile.

# 512 MiB that differ everywhere, and a progress function that strikes once, in the middle of a transfer.
BIG = 512 * MIB
LARGE = "state = np.arange(64 << 20)"
STRIKE = """
calls = []
def progress(done, wanted):
    calls.append((done, wanted))
    if 0 < done < wanted and len(calls) == 1:
        strike()
mine = np.ones(64 << 20, np.int64)
"""


def test_a_newcomer_or_a_holder_killed_during_the_transfer_costs_the_others_nothing() -> None:
    with running() as run:
        peers, doomed, late = members(run, 3), newcomer(run), newcomer(run)
        held = synced(peers, LARGE + "; state = sync(state)")[0]["digest"]
        tell(doomed, STRIKE + "strike = lambda: os.kill(os.getpid(), signal.SIGKILL)")
        tell(doomed, "state = sync(mine, progress=progress)")
        sent = 0
        while doomed[0].process.poll() is None:
            tell(peers, "state = sync(state)")
            answers = agreed(peers, all_live=False)
            assert moved(answers) == [0, 0, 0]
            sent += sum(answer["tx"] for answer in answers)
        assert doomed[0].ends() == -signal.SIGKILL
        assert 0 < sent <= BIG
        assert synced(peers, "state = sync(state)")[0]["size"] == 3
        # The one that everybody asks first.
        tell(late, STRIKE + f"strike = lambda: os.kill({peers[0].pid}, signal.SIGKILL)")
        tell(late, "state = sync(mine, progress=progress)")
        tell(peers, f"state = sync(state, until={late.ids[0]!r})")
        left = peers[1:] + late
        answers = agreed(left, all_live=False)
        assert peers[0].ends() == -signal.SIGKILL
        assert moved(answers) == [0, 0, BIG]
        assert (answers[0]["size"], answers[0]["digest"]) == (3, held)
        assert moved(synced(left, "state = sync(state)")) == [0, 0, 0]


def test_a_holder_that_freezes_during_the_transfer_is_replaced() -> None:
    with running(**FAST) as run:
        peers, late = members(run, 2), newcomer(run)
        held = synced(peers, LARGE + "; state = sync(state)")[0]["digest"]
        tell(late, STRIKE + f"strike = lambda: os.kill({peers[0].pid}, signal.SIGSTOP)")
        tell(late, "state = sync(mine, progress=progress)")
        tell(peers, f"state = sync(state, until={late.ids[0]!r})")
        left = peers[1:] + late
        answers = agreed(left, all_live=False)
        assert moved(answers) == [0, BIG]
        assert (answers[0]["size"], answers[0]["digest"]) == (2, held)
        peers[0].signal(signal.SIGCONT)
        assert failed(peers[0].next(), "Evicted")["advice"] == "rejoin"
        # In the same process.
        tell(peers[:1], "pccl.shutdown(); join()")
        again = Peers(peers[:1])
        tell(again, "state[5] = 5; state[7] = 0; state = sync(state)")
        tell(left, f"state = sync(state, until={again.ids[0]!r})")
        assert moved(agreed(left + again)) == [0, 0, MIB]


def test_a_state_whose_last_holder_is_lost_is_not_made_up() -> None:
    with running() as run:
        peers, late = members(run, 1), newcomer(run)
        synced(peers, LARGE + "; state = sync(state)")
        tell(late, STRIKE + f"strike = lambda: os.kill({peers[0].pid}, signal.SIGKILL)")
        tell(peers, "state = sync(state, until=2)")
        answer = do(late, "state = sync(mine, progress=progress)")[0]
        assert failed(answer, "StateUnavailable", "NO_SHARED_STATE_AVAILABLE")["advice"] == "stop"
        assert do(late, "say(kept=bool((mine == 1).all()))") == [{"kept": True}]
        # A checkpoint may take its place.
        assert synced(late, "state = sync(mine, revision=5)")[0]["revision"] == 5
        assert synced(late, "state = sync(mine)")[0]["revision"] == 6


def test_ctrl_c_during_the_transfer_ends_the_sync_for_all_and_nothing_is_written() -> None:
    with running() as run:
        peers, late = members(run, 2), newcomer(run)
        held = synced(peers, LARGE + "; state = sync(state)")[0]["digest"]

        def gave_up(who: Worker) -> None:
            for peer in peers + late:
                if peer is not who:
                    told = failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
                    assert told["advice"] == "retry"
            assert do(late, "say(kept=bool((mine == 1).all()), same=state is mine)") == [
                {"kept": True, "same": True}
            ]
            assert do(peers, "say(held=digest(state))") == [{"held": held}] * 2

        tell(late, STRIKE + "strike = lambda: signal.raise_signal(signal.SIGINT)")
        tell(late, "state = sync(mine, progress=progress)")
        tell(peers, "state = sync(state, until=3)")
        interrupted(late[0].next())
        gave_up(late[0])
        # The newcomer interrupts a member, and freezes until that has had its effect.
        tell(late, STRIKE + f"strike = lambda: os.kill({peers[1].pid}, signal.SIGINT) or freeze()")
        tell(late, "freeze = lambda: os.kill(os.getpid(), signal.SIGSTOP)")
        tell(late, "state = sync(mine, progress=progress)")
        tell(peers, "state = sync(state, until=3)")
        interrupted(peers[1].next(5))
        os.waitid(os.P_PID, late[0].pid, os.WSTOPPED)
        late[0].signal(signal.SIGCONT)
        gave_up(peers[1])
        # The next one succeeds, and reports its progress.
        tell(peers + late, "calls = []; report = lambda done, wanted: calls.append((done, wanted))")
        answers = synced(peers + late, "state = sync(state, progress=report)")
        assert (moved(answers), answers[0]["size"], answers[0]["digest"]) == ([0, 0, BIG], 3, held)
        calls = do(late, "say(calls=calls)")[0]["calls"]
        assert calls == sorted(calls)
        assert 0 < calls[0][0] <= calls[-1][0] == BIG
        assert {wanted for _, wanted in calls} == {BIG}
        assert do(peers, "say(calls=calls)") == [{"calls": []}] * 2  # they received nothing


def test_ctrl_c_that_comes_when_the_state_is_in_spoils_it_for_nobody() -> None:
    with running() as run:
        peers, late = members(run, 2), newcomer(run)
        held = synced(peers, "state = sync({'n': 7, 'w': noise(1, 1000)})")[0]["digest"]
        # So small a state is reported only once: when it is here.
        tell(
            late,
            "mine = {'n': 0, 'w': noise(2, 1000)}; strike = lambda *_: signal.raise_signal(signal.SIGINT)",
        )
        tell(late, "state = sync(mine, progress=strike)")
        tell(peers, "state = sync(state, until=3)")
        interrupted(late[0].next())
        assert [peer.expect("synced")["digest"] for peer in peers] == [held] * 2
        assert do(late, "say(w=bool((mine['w'] == noise(1, 1000)).all()))") == [{"w": True}]
        # What could not be returned comes again.
        answers = synced(peers + late, "state = sync(state)")
        assert (moved(answers), answers[0]["digest"]) == ([0, 0, 1], held)


def test_ctrl_c_in_a_waiting_sync_ends_it_for_all() -> None:
    with running() as run:
        peers = members(run, 2)
        tell(peers, "mine = np.full(1000, pccl.rank())")
        tell(peers[:1], "say(event='calling'); state = sync(mine)")
        peers[0].expect("calling")
        wait_until_asleep(peers[0])
        peers[0].signal(signal.SIGINT)
        interrupted(peers[0].next())
        tell(peers[1:], "state = sync(mine)")
        failed(peers[1].next(), "PeerLost", "RANK_CONNECTION_LOST")
        assert do(peers, "say(kept=bool((mine == pccl.rank()).all()))") == [{"kept": True}] * 2
        assert moved(synced(peers, "state = sync(mine)")) == [0, 8000]


def test_ctrl_c_and_deadlines_end_the_sync_for_all_also_while_the_state_is_hashed() -> None:
    # So large that hashing takes a while, and of one page: every piece of it is the same memory.
    large = """
    import mmap, tempfile
    def huge():
        file = tempfile.TemporaryFile()
        file.truncate(6 << 30)
        return np.frombuffer(mmap.mmap(file.fileno(), 6 << 30, prot=mmap.PROT_READ), np.uint8)
    """
    with running() as run:
        peers = members(run, 2)
        synced(peers, "mine = np.zeros(3); state = sync(mine)")
        tell(peers, large)
        tell(peers[:1], "try: pccl.sync(huge(), timeout=0.3)\nexcept pccl.Timeout as e: failed(e)")
        told = failed(peers[0].next(), "Timeout")
        assert "hashed" in told["text"]
        failed(do(peers[1:], "state = sync(mine)")[0], "Timeout")
        tell(peers[1:], "state = sync(mine)")
        tell(
            peers[:1],
            "big = huge(); threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()",
        )
        tell(peers[:1], "state = sync(big)")
        interrupted(peers[0].next())
        failed(peers[1].next(), "PeerLost", "RANK_CONNECTION_LOST")
        assert moved(synced(peers, "state = sync(mine)")) == [0, 0]


def test_ctrl_c_in_the_moment_in_which_newcomers_are_let_in_ends_the_sync_for_all() -> None:
    slow = """
    import time
    def interrupt(*_):
        say(event="interrupted")
        hear()
        raise KeyboardInterrupt
    signal.signal(signal.SIGUSR1, interrupt)
    """
    for newcomers in (0, 1):
        with running() as run:
            peers = members(run, 2)
            synced(peers, "state = sync(np.zeros(3))")
            tell(peers[:1], slow)
            late = newcomer(run, newcomers)
            tell(late, "state = sync(np.ones(3))")
            tell(peers[:1], "say(event='calling'); state = sync(state)")
            peers[0].expect("calling")
            wait_until_asleep(peers[0])
            peers[0].signal(signal.SIGUSR1)
            peers[0].expect("interrupted")
            tell(peers[1:], "say(event='calling'); state = sync(state)")
            peers[1].expect("calling")
            wait_until_asleep(peers[1])  # the round before is decided, and it waits in the next
            peers[0].tell("go on")
            interrupted(peers[0].next())
            for peer in [*peers[1:], *late]:
                failed(peer.next(), "PeerLost", "RANK_CONNECTION_LOST")
            tell(late, "state = sync(np.ones(3))")
            tell(peers, "state = sync(state)")
            assert agreed(peers + late)[0]["size"] == 2 + newcomers


def test_a_deadline_ends_the_sync_for_all() -> None:
    with running() as run:
        peers = members(run, 2)
        tell(peers, "mine = np.full(1000, pccl.rank())")
        failed(do(peers[:1], "state = sync(mine, timeout=0.3)")[0], "Timeout")
        failed(do(peers[1:], "state = sync(mine)")[0], "Timeout")
        assert do(peers, "say(kept=bool((mine == pccl.rank()).all()))") == [{"kept": True}] * 2
        assert moved(synced(peers, "state = sync(mine, timeout=20)")) == [0, 8000]


def test_a_newcomers_sync_waits_to_be_let_in_and_can_be_ended() -> None:
    with running() as run:
        peers = members(run, 1)
        synced(peers, "state = sync(np.zeros(1000))")
        late = newcomer(run)
        failed(do(late, "mine = np.ones(1000); state = sync(mine, timeout=0.3)")[0], "Timeout")
        tell(late, "say(event='calling'); state = sync(mine)")
        late[0].expect("calling")
        wait_until_asleep(late[0])
        late[0].signal(signal.SIGINT)
        interrupted(late[0].next())
        assert do(late, "say(kept=bool((mine == 1).all()))") == [{"kept": True}]
        tell(late, "state = sync(mine)")
        tell(peers, "state = sync(state, until=2)")
        assert moved(agreed(peers + late)) == [0, 8000]


def test_members_do_not_wait_for_a_newcomer_that_gave_up_waiting() -> None:
    with running() as run:
        peers = members(run, 1)
        synced(peers, "state = sync(np.zeros(1000))")
        late = newcomer(run)
        failed(do(late, "state = sync(np.ones(1000), timeout=0.3)")[0], "Timeout")
        tell(peers, "state = sync(state)")
        assert agreed(peers, timeout=4)[0]["size"] == 1


def test_sync_and_allreduce_cannot_meet() -> None:
    reduce = """
    try:
        pccl.allreduce(x(10))
        say(event="reduced")
    except pccl.PCCLError as error:
        failed(error)
    """
    sync = "state = sync(np.full(1000, pccl.rank()))"
    with running() as run:
        peers = members(run, 2)
        tell(peers[:1], sync)
        tell(peers[1:], reduce)
        told = [
            failed(peers[0].next(), "Deadlock"),
            failed(peers[1].next(), "Deadlock", "RANK_CONNECTION_LOST"),
        ]
        assert told[0]["waiting"] == told[1]["waiting"]
        for word in ("sync", peers.ids[0][:8], "allreduce", peers.ids[1][:8]):
            assert word in told[0]["text"]
        # The other call is covered: whoever comes to it gets the error too, once.
        failed(do(peers[:1], reduce)[0], "Deadlock", "RANK_CONNECTION_LOST")
        failed(do(peers[1:], sync)[0], "Deadlock")
        assert moved(synced(peers, sync)) == [0, 8000]
        assert do(peers, reduce) == [{"event": "reduced"}] * 2
        assert len(told[0]["waiting"]) == 2  # a line per member


# Level 2: the life of a state.


def test_a_group_that_empties_starts_anew() -> None:
    with running(**FAST) as run:
        digests = set()
        for leave in ("pccl.shutdown()", "os.kill(os.getpid(), signal.SIGKILL)", ""):
            peers = members(run, 2)
            answers = synced(peers, "state = sync(noise(value(pccl.init_peer), 1000))")
            assert sorted(moved(answers)) == [0, 1000]
            assert answers[0]["revision"] == 0
            digests.add(answers[0]["digest"])
            assert synced(peers, "state = sync(state)")[0]["revision"] == 1
            tell(peers, leave)
        assert len(digests) == 3


def test_a_state_lives_while_one_holder_lives() -> None:
    with running() as run:
        peers = members(run, 3)
        first = synced(peers, "state = sync(noise(pccl.rank(), 1000))")
        for victim in peers[:2]:
            victim.signal(signal.SIGKILL)
        late = newcomer(run)
        tell(late, "state = sync(noise(7, 1000))")
        tell(peers[2:], "state = sync(state, until=2)")
        answers = agreed([*peers[2:], *late])
        assert moved(answers) == [0, 1000]
        assert answers[0]["digest"] == first[0]["digest"]
        # The last of the founders leaves, too.
        tell(peers[2:], "pccl.shutdown()")
        later = newcomer(run)
        tell(later, "state = sync(noise(8, 1000))")
        tell(late, "while pccl.world_size() > 1: pccl.barrier()")
        tell(late, "state = sync(state, until=2)")
        answers = agreed(late + later)
        assert moved(answers) == [0, 1000]
        assert answers[0]["digest"] == first[0]["digest"]
        assert answers[0]["revision"] > first[0]["revision"]


# Level 1.


def test_level_1_members_in_lockstep_move_nothing_and_a_newcomer_receives() -> None:
    with running() as run:
        peers = members_1(run, 2)
        tell(
            peers,
            "share(w=noise(value(comm._engine.peer_id()), 3_000_000), step=np.zeros(1, np.int64))",
        )
        answers = synced(peers, "sync()")
        assert moved(answers) == [0, 3_000_000]
        for revision in range(1, 4):
            answers = synced(peers, "state.arrays['step'] += 1; state.push_revision(); sync()")
            assert moved(answers) == [0, 0]
            assert answers[0]["revision"] == revision
        late = newcomer_1(run, peers)
        tell(late, "share(w=noise(9, 3_000_000), step=np.zeros(1, np.int64)); sync()")
        tell(peers, "state.push_revision(); sync()")
        everybody = peers + late
        answers = agreed(everybody)
        assert moved(answers) == [0, 0, 3_000_008]
        assert [answer["revision"] for answer in answers] == [
            4,
            4,
            4,
        ]  # written back to the newcomer
        assert moved(synced(everybody, "state.push_revision(); sync()")) == [0, 0, 0]


def test_level_1_a_member_that_lags_is_dragged_along() -> None:
    with running() as run:
        peers = members_1(run, 3)
        synced(peers, "share(w=np.zeros(100)); sync()")
        # Two forget to count, and would be the majority.
        tell(peers[1:], "state.arrays['w'] += 1; sync()")
        tell(peers[:1], "state.arrays['w'] += 2; state.push_revision(); sync()")
        answers = agreed(peers)
        assert moved(answers) == [0, 800, 800]
        assert [answer["revision"] for answer in answers] == [1, 1, 1]
        assert do(peers, "say(w=state.arrays['w'].tolist() == [2.0] * 100)") == [{"w": True}] * 3
        # Behind in its number alone: nothing moves.
        tell(peers[2:], "sync()")
        tell(peers[:2], "state.push_revision(); sync()")
        answers = agreed(peers)
        assert moved(answers) == [0, 0, 0]
        assert [answer["revision"] for answer in answers] == [2, 2, 2]


def test_level_1_a_run_resumes_at_a_checkpoints_revision() -> None:
    with running() as run:
        peers = members_1(run, 2)
        tell(peers[:1], "share(w=np.zeros(100)); sync()")
        tell(peers[1:], "share(w=np.ones(100), revision=41); sync()")
        answers = agreed(peers)
        assert moved(answers) == [800, 0]
        assert answers[0]["revision"] == 41
        assert synced(peers, "state.push_revision(); sync()")[0]["revision"] == 42
        # Ahead of the run: refused as a candidate, welcome as a receiver.
        late = newcomer_1(run, peers)
        tell(late, "share(w=np.ones(100), revision=44); sync()")
        tell(peers, "state.push_revision(); sync()")
        failed(late[0].next(), "RevisionMismatch")
        answers = agreed(peers)
        assert (answers[0]["revision"], answers[0]["size"]) == (43, 2)
        tell(late, "join(1)")
        tell(peers, "grow(3)")
        late = Peers(late)
        tell(late, "share(w=np.zeros(100), revision=99); sync('RECEIVE_ONLY')")
        tell(peers, "state.push_revision(); sync('SEND_ONLY')")
        answers = agreed(peers + late)
        assert moved(answers) == [0, 0, 800]
        assert answers[2]["revision"] == 44


def test_level_1_senders_and_receivers_pair() -> None:
    with running() as run:
        peers = members_1(run, 3)
        synced(peers, "share(w=np.zeros(1000)); sync()")
        # The receivers are the majority, stand longer, and claim a higher revision: they offer nothing.
        tell(peers[:2], "share(w=np.ones(1000), revision=7); sync('RECEIVE_ONLY')")
        tell(
            peers[2:],
            "share(w=np.full(1000, 2.0), revision=1); state.arrays['w'].flags.writeable = False",
        )
        tell(peers[2:], "sync('SEND_ONLY')")
        answers = agreed(peers)
        assert moved(answers) == [8000, 8000, 0]
        assert answers[0]["revision"] == 1


def test_level_1_strategies_that_do_not_mix_are_refused_and_may_join_again() -> None:
    with running() as run:
        peers = members_1(run, 3)
        synced(peers, "share(w=np.zeros(1000)); sync()")
        tell(peers[:2], "state.push_revision(); sync()")
        tell(peers[2:], "state.push_revision(); sync('SEND_ONLY')")
        told = failed(peers[2].next(), "Evicted")
        assert told["advice"] == "rejoin" and "ENFORCE_POPULAR" in told["text"]
        answers = agreed(peers[:2])
        assert (answers[0]["size"], moved(answers)) == (2, [0, 0])
        # A new connect on the same communicator.
        tell(peers[2:], "join(1)")
        tell(peers[:2], "grow(3)")
        peers[2].expect("in")
        tell(peers[2:], "share(w=np.ones(1000)); sync()")
        tell(peers[:2], "state.push_revision(); sync()")
        assert moved(agreed(peers)) == [0, 0, 8000]


def test_level_1_a_sender_that_loses_the_election_is_evicted() -> None:
    with running() as run:
        peers = members_1(run, 3)
        synced(peers, "share(w=np.zeros(1000)); sync()")
        tell(peers[:1], "state.arrays['w'][0] = 1")
        tell(peers, "state.push_revision(); sync('SEND_ONLY')")
        assert "another one was elected" in failed(peers[0].next(), "Evicted")["text"]
        answers = agreed(peers[1:])
        assert (answers[0]["size"], moved(answers)) == (2, [0, 0])


def test_level_1_receivers_without_a_sender_all_get_the_same_error() -> None:
    with running() as run:
        peers = members_1(run, 2)
        told = do(peers, "share(w=np.zeros(1000)); sync('RECEIVE_ONLY')")
        for answer in told:
            failed(answer, "StateUnavailable")
        assert told[0]["text"] == told[1]["text"]
        assert moved(synced(peers, "sync()")) == [0, 0]


def test_level_1_entries_that_may_differ_are_only_for_newcomers() -> None:
    with running() as run:
        peers = members_1(run, 2)
        make = "share(w=noise(1, 1000), rng=noise({seed}, 3000), loose=('rng',)); sync()"
        for seed, peer in enumerate(peers):
            tell([peer], make.format(seed=seed))
        told = [peer.expect("synced") for peer in peers]
        assert moved(told) == [0, 0]
        assert told[0]["digest"] != told[1]["digest"]
        late = newcomer_1(run, peers)
        tell(late, "share(w=noise(9, 1000), rng=noise(9, 3000), loose=('rng',)); sync()")
        tell(peers, "state.push_revision(); sync()")
        told = [peer.expect("synced") for peer in peers + late]
        assert moved(told) == [0, 0, 4000]
        assert told[2]["digest"] == told[0]["digest"] != told[1]["digest"]
        # From then on it is its own.
        tell(late, "state.arrays['rng'] += 1")
        told = do(peers + late, "state.push_revision(); sync()")
        assert moved(told) == [0, 0, 0]


def test_level_1_takes_every_data_type_any_size_and_any_alignment() -> None:
    with running() as run:
        peers = members_1(run, 2)
        answers = synced(
            peers,
            """
            import ml_dtypes

            def place(dtype, count, offset):
                memory = bytearray(count * dtype.itemsize + offset)
                array = np.ndarray(count, dtype, memory, offset)
                # Every byte is another one on each member.
                array.view(np.uint8)[...] = noise(count, count * dtype.itemsize) + np.uint8(pccl.rank(comm))
                return array

            arrays = {}
            for dtype in pccl.DataType:
                for count in (1, 7, (1 << 20) // dtype.size + 1):
                    for offset in (0, 1, 13):
                        arrays[f"{dtype.name} {count} {offset}"] = place(dtype.to_numpy_dtype(), count, offset)
            arrays["empty"] = np.empty(0, np.int16)
            share(**arrays)
            sync()
            """,
        )
        sizes = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)
        assert moved(answers) == [0, 3 * sum(9 * size + MIB for size in sizes)]


def test_level_1_a_pending_operation_and_a_read_only_array_are_errors_of_this_member_alone() -> (
    None
):
    with running() as run:
        peers = members_1(run, 2)
        reduce = "a = np.ones(10); handle = comm.all_reduce_async(a, np.zeros(10), op='sum')"
        tell(peers, "share(w=np.full(1000, comm._engine.membership()[1]))")
        failed(do(peers[:1], reduce + "; sync()")[0], "PendingOperations", "PENDING_ASYNC_OPS")
        tell(peers[1:], reduce)
        tell(peers, "assert handle.wait()[0]")
        tell(peers[:1], "state.arrays['w'].flags.writeable = False")
        told = failed(do(peers[:1], "sync()")[0], "InvalidArgument", "INVALID_ARGUMENT")
        assert "w is read-only" in told["text"]
        tell(peers[:1], "state.arrays['w'].flags.writeable = True")
        assert moved(synced(peers, "sync()")) == [0, 8000]


def test_level_1_entries_that_differ_are_named() -> None:
    usual = "share(v=np.zeros(3), w=np.zeros(1000))"
    with running() as run:
        peers = members_1(run, 3)

        def disagree(odd: str, name: str) -> None:
            tell(peers[:1], odd + "; sync()")
            told = [
                failed(answer, "MismatchedCall")
                for answer in [*do(peers[1:], usual + "; sync()"), peers[0].next()]
            ]
            assert len({answer["text"] for answer in told}) == 1
            assert {answer["peer"] for answer in told} == {peers.ids[0]}
            assert f" {name}:" in told[0]["text"]

        odd_ones = (
            ("share(v=np.zeros(3), w=np.zeros(1001))", "w"),
            ("share(v=np.zeros(3), w=np.ones(1000, np.int64))", "w"),
            ("share(w=np.zeros(1000))", "v"),
            ("share(u=np.zeros(3), v=np.zeros(3), w=np.zeros(1000))", "u"),
            ("share(v=np.ones(3), w=np.zeros(1000), loose=('v',))", "v"),
        )
        for odd, name in odd_ones:
            disagree(odd, name)
        assert moved(synced(peers, usual + "; sync()")) == [0, 0, 0]
        # A newcomer that lacks an entry is refused here: nobody could write it for it.
        late = newcomer_1(run, peers)
        tell(late, "share(w=np.zeros(1000)); sync()")
        tell(peers, "state.push_revision(); sync()")
        told = failed(late[0].next(), "MismatchedCall")
        assert late.ids[0][:8] in told["text"] and " v:" in told["text"]
        assert agreed(peers)[0]["size"] == 3


def test_level_1_entries_overlap_on_no_member_and_are_one_memory_on_all_or_none() -> None:
    memory = "m = np.zeros(9); "
    tied, apart = memory + "share(v=m, w=m)", memory + "share(v=m, w=m.copy())"
    overlapping = memory + "share(v=m[:5], w=m[4:])"
    with running() as run:
        peers = members_1(run, 3)
        for odd, usual, kind, result in (
            (overlapping, overlapping.replace("4:", "5:"), "InvalidArgument", "INVALID_ARGUMENT"),
            (tied, apart, "MismatchedCall", "INVALID_USAGE"),
            (apart, tied, "MismatchedCall", "INVALID_USAGE"),
        ):
            tell(peers[:1], odd + "; sync()")
            tell(peers[1:], usual + "; sync()")
            told = [failed(peer.next(), kind, result) for peer in peers]
            assert len({answer["text"] for answer in told}) == 1
            assert {answer["peer"] for answer in told} == {peers.ids[0]}
            assert " w" in told[0]["text"] and "memory" in told[0]["text"]
        assert moved(synced(peers, tied + "; sync()")) == [0, 0, 0]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_level_1_a_tensor_may_get_other_memory_between_two_syncs() -> None:
    with running() as run:
        peers = members_1(run, 2)
        answers = synced(
            peers,
            """
            import torch
            first = comm._engine.membership()[1] == 0
            p = torch.nn.Parameter(torch.full((1 << 22,), 1.0 if first else 2.0))
            share(none=np.zeros(0))
            state.tensor_infos.append(pccl.TensorInfo.from_torch(p, "p"))
            state.tensor_infos.append(pccl.TensorInfo.from_torch(torch.empty(0), "e"))
            p.data = torch.full((1 << 22,), 5.0 if first else 6.0)  # the old memory is unmapped
            sync()
            """,
        )
        assert moved(answers) == [0, 16 * MIB]
        assert do(peers, "say(p=[float(p.min()), float(p.max())])") == [{"p": [5.0, 5.0]}] * 2
        tell(peers, "p.data = torch.zeros(3); state.push_revision()")
        for answer in do(peers, "sync()"):
            assert "was resized" in failed(answer, "InvalidUsage")["text"]


def test_level_1_order_of_entries_and_memory_of_tensors_do_not_matter() -> None:
    with running() as run:
        peers = members_1(run, 2)
        tell(peers[:1], "share(a=np.zeros(10), b=np.ones(10)); sync()")
        tell(peers[1:], "share(b=np.zeros(10), a=np.zeros(10)); sync()")
        assert moved(agreed(peers)) == [0, 80]
        # Held by reference: nobody else has these arrays any more.
        tell(
            peers,
            """
            def infos():
                return [pccl.TensorInfo.from_numpy(np.full(1 << 20, comm._engine.membership()[1], np.int8), "w")]
            arrays = state.arrays
            state = pccl.SharedState(infos())
            state.arrays, state.revision = {}, 1
            import gc
            gc.collect()
            noise(1, 1 << 22)
            """,
        )
        assert moved(synced(peers, "sync()")) == [0, MIB]
        failed(
            do(peers[:1], "share(a=np.zeros(1)); state.tensor_infos *= 2; sync()")[0],
            "InvalidArgument",
            "INVALID_ARGUMENT",
        )
