"""Inner parts of the engine that tests drive directly. Not for users; absent from wheels."""

from typing import Any, TypedDict

import numpy as np

class ChunkFlow(TypedDict):
    sources: list[tuple[int, bool]]
    partial_to: int | None
    final_from: int | None
    final_to: list[int]
    owner: bool

class SimulationReport(TypedDict):
    options: str
    events: int
    commits: int
    aborts: int
    reruns: int
    epochs: int
    faults: int
    kills: int
    joins: int
    evictions: int
    restarts: int
    takeovers: int
    master_lost: int
    rebuilds: int
    deadlocks: int
    mismatches: int
    checksum_drops: int
    stand_ins: int
    sent_again: int
    relayed: int
    syncs: int
    sync_failures: int
    sync_bytes: int
    seconds: float
    reached: set[tuple[str, str]]
    # Rows of a table of phases: from, to, cause, how often it was taken.
    link_transitions: list[tuple[str, str, str, int]]
    call_transitions: list[tuple[str, str, str, int]]
    violation: str
    trace: list[str]

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

def reduce(
    dtype: int,
    op: int,
    own: _Bytes,
    contributions: list[tuple[_Bytes, bool]],
    divisor: int,
    out: _Bytes,
    count: int,
) -> None: ...
def instruction_set() -> str: ...
def coded_size(code: int, block: int, wide: bool, count: int) -> int: ...
def encode(
    code: int,
    zero_exact: bool,
    stochastic: bool,
    block: int,
    wide: bool,
    values: _Bytes,
    seed: int,
    coded: _Bytes,
    step: int = 0,
) -> None: ...
def decode(
    code: int, block: int, wide: bool, coded: _Bytes, values: _Bytes, step: int = 0
) -> None: ...
def force_instruction_set(name: str) -> bool: ...
def ring(order: list[int], rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def direct(shares: list[int], rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def by_regions(
    hosts: list[int], regions: list[int], rank: int
) -> tuple[list[ChunkFlow], list[int]]: ...
def by_hosts(hosts: list[int], around: bool, rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def through(hub: int, ranks: int, rank: int) -> tuple[list[ChunkFlow], list[int]]: ...
def cut(
    arrays: list[tuple[int, int]], op: int, shares: list[int], segment_bytes: int
) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int, int]]]: ...

# Measuring (cpp/tests/testing/prober.cpp).
def probed_row(
    ways: list[tuple[int, int, int, int, int]],
) -> _Row: ...

class RateWatcher:
    def look(self, links: list[tuple[int, int, bool]]) -> _Row: ...
    def round_trip(self, peer: int, microseconds: int) -> _Row: ...
    def skip(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def know(self, up: int, down: int, links: dict[int, tuple[int, int]]) -> None: ...

# Stripes that end (cpp/tests/testing/stand_in.cpp).
def stand_in(
    sizes: list[int],
    written: int,
    read: int,
    pieces: list[int],
    spoilt: int = -1,
    told: int = 0,
    released: bool = False,
) -> tuple[list[int], int, list[int], list[int], int]: ...
def tune_stripes(
    first: int, least: int, most: int, windows: list[tuple[int, float, bool, bool]]
) -> list[int]: ...
def settle_stripes(first: int, least: int, most: int, rates: list[float], windows: int) -> int: ...

# Codec (cpp/tests/testing/codec.cpp).
def pipe_play(data: bytes, writes: list[int], reads: list[int], pieces: int) -> bytes: ...
def pipe_race(bytes: int, largest: int, seed: int) -> int: ...
def proof(key: bytes, about: list[int]) -> bytes: ...

control_types: int

def control_round_trip(type: int, entropy: bytes) -> tuple[bytes, bool]: ...
def control_decode(
    data: bytes, pieces: list[int], max_payload: int
) -> tuple[list[bytes], str, int]: ...
def control_sample(name: str) -> bytes: ...
def link_sample() -> bytes: ...
def link_seal(header: bytes) -> bytes: ...
def link_write(
    frames: list[tuple[int, bytes]], pieces: list[int], release_after: int = -1
) -> bytes: ...
def link_read(
    data: bytes, pieces: list[int], choices: bytes, release_after: int = -1
) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]], int, str]: ...

# Simulated runs (cpp/tests/simulation/simulation.h has the options; those not given are drawn from the seed).
def simulate(
    seed: int,
    *,
    quiet: bool = False,
    program: str = ...,
    bug: str = ...,
    trace: bool = ...,
    peers: int = ...,
    joins: int = ...,
    steps: int = ...,
    max_elements: int = ...,
    kills: int = ...,
    freezes: int = ...,
    partitions: int = ...,
    cuts: int = ...,
    stalls: int = ...,
    corruptions: int = ...,
    leaves: int = ...,
    aborts: int = ...,
    restarts: int = ...,
    masters: int = ...,
    splits: int = ...,
    master_stalls: int = ...,
) -> SimulationReport: ...

# The master's judgements (cpp/tests/testing/decisions.cpp); peers are small numbers.
def judge_mismatch(
    claims: list[tuple[int, int]], members: int, waited_enough: bool
) -> int | None: ...
def judge_links(members: list[int], reports: list[tuple[int, int]]) -> int | None: ...
def judge_stuck(
    members: list[tuple[bool, list[int], bool, bool, bool]], meets: set[int]
) -> int: ...
def make_plan(
    world: int, unusable: set[tuple[int, int]], hosts: list[int] = ...
) -> tuple[list[int], list[str], set[tuple[int, int]]] | None: ...
def detours(
    world: int,
    unusable: set[tuple[int, int]],
    never: set[tuple[int, int]],
    most: int,
    hosts: list[int] = ...,
) -> set[tuple[int, int]]: ...
def plannable(
    world: int, unusable: set[tuple[int, int]], never: set[tuple[int, int]], most: int
) -> bool: ...

# Plans chosen from measurements (cpp/tests/testing/topology.cpp).
# ([(up, down)] by rank, [(unreachable, kilobytes per s, rtt in us)] by from * n + to)
_Table = tuple[list[tuple[int, int]], list[tuple[bool, int, int]]]
# (order, [(max_bytes, kind, shares)], hosts)
_Plan = tuple[list[int], list[tuple[int, str, list[int]]], list[int]]
# ([(to, unreachable, kilobytes per s, rtt in us)], up, down)
_Row = tuple[list[tuple[int, bool, int, int]], int, int]

def choose_plan(
    table: _Table, unusable: set[tuple[int, int]] = ..., hosts: list[int] = ...
) -> tuple[_Plan, str, set[tuple[int, int]]] | None: ...
def plan_flows(
    plan: _Plan, bytes: int, rank: int, kind: int = ...
) -> tuple[list[tuple[list[int], int | None, int | None, list[int]]], list[int]]: ...
def best_ring(table: _Table) -> list[int] | None: ...
def best_shares(table: _Table) -> list[float] | None: ...
def predict(plan: _Plan, table: _Table, bytes: int) -> float: ...
def lower_bound(table: _Table, bytes: int) -> float: ...
def worth_changing(present: _Plan, other: _Plan, table: _Table) -> bool: ...

class Planner:
    """A master's group of members 1, 2, ... that call optimize_topology."""

    def __init__(self, members: int) -> None: ...
    def optimize(self, rows: list[_Row | None]) -> None: ...
    def measured(self, number: int, row: _Row) -> None: ...
    def tick(self, seconds: int) -> None: ...
    def leave(self, number: int) -> None: ...
    def rebuild(self) -> None: ...
    def record(self) -> tuple[int, int, _Plan, _Table, list[int], int]: ...
    def lines(self) -> list[str]: ...

def judge_state(
    votes: list[tuple[int, int | None, int, int, list[tuple[str, str, str]], int, int, bool]],
    revision: int | None,
    holders: list[int],
    *,
    owned: bool,
    details: bool,
    flaws: dict[int, str],
) -> dict[str, Any]:
    """What a sync decides. `votes`: (peer, revision, strategy, content, [(name, kind, tie)],
    member since, worked since, whole) in rank order.

    `revision` and `holders`: the state before; None: there was none. Keys of the result: removals
    (peer, code), code, culprit, reason, step, revision, content, holders, receivers, newcomers,
    diverged.
    """

def judge_ends(ends: list[tuple[int, int, int, int, list[int]]]) -> dict[str, Any]:
    """How a transfer ended. `ends`: (peer, code, revision, content, lost). Keys as above."""

def enter_rounds(rounds: list[tuple[int, int, int]], max_open_bytes: int) -> list[bool]:
    """Whether a member that enters these (kind, sequence, bytes of a list of entries) may stay, each time."""

def manifest_fits(
    theirs: list[tuple[str, str, list[int], int, bool]],
    own: list[tuple[str, str, list[int], int, bool]],
) -> bool:
    """Whether a holder's list of entries (name, kind, shape, bytes, writable) is taken by who has `own`."""

def overlap(
    a: tuple[int, int, list[tuple[int, int]]], b: tuple[int, int, list[tuple[int, int]]]
) -> bool:
    """Whether arrays share a byte: (address, bytes of an element, [(count, stride) by axis]) each."""

def chunk_places(sizes: list[int]) -> list[tuple[int, int, int]]:
    """(entry, offset, bytes) of every chunk of entries of these sizes."""

class Receiver:
    """One receiver's transfer of a state (cpp/tests/testing/transfer.cpp): arrays of bytes, from holders 1, 2, ..."""

    def __init__(
        self, old: list[bytes], new: list[bytes], holders: int, writable: bool
    ) -> None: ...
    def next(self, to: int) -> tuple[bool, list[int]] | None: ...
    def begins(self, number: int, holder: int, chunk: int | None) -> str: ...
    def fill(self, number: int, spoilt: bool = False) -> None: ...
    def arrived(self, number: int) -> None: ...
    def voided(self, number: int) -> None: ...
    def link(self, holder: int, up: bool) -> None: ...
    def tick(self, seconds: int) -> None: ...
    def asked(self, peer: int, later: int, chunks: list[int]) -> bool: ...
    def serves(self, later: int, peer: int) -> list[int]: ...
    def over(self) -> tuple[int, str] | None: ...
    def result(self) -> list[bytes]: ...

def rejoin_sizes(entries: int, name_bytes: int) -> tuple[int, list[int]]:
    """Bytes of a member's first message when it comes back in a sync, and of the later ones."""

class MasterPlay:
    """A master and members 1, 2, ..., on connections of these numbers (cpp/tests/testing/hostile.cpp)."""

    def __init__(
        self,
        members: int,
        limits: dict[str, int] = {},
        addresses: list[str] = [],
        names: list[str] = [],
    ) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def connect(self, connection: int, address: str) -> None: ...
    def disconnect(self, connection: int) -> None: ...
    def tried(self, connection: int, reached: bool) -> None: ...
    def says(
        self,
        connection: int,
        type: int,
        payload: bytes,
        ordinal: int | None = None,
        term: int = 1,
        run: int | None = None,
    ) -> None: ...
    def term(self) -> int: ...
    def passes(self, seconds: float, mute: list[int] = [], silent: list[int] = []) -> None: ...
    def told(self) -> list[tuple[int, str, int, str]]: ...
    def members(self) -> list[int]: ...
    def epoch(self) -> int: ...
    def has_group(self, group: int) -> bool: ...
    def anonymous(self, connection: int) -> bool: ...
    def restart(self, relayed: dict[int, list[tuple[int, int]]] = {}) -> None: ...
    def links(self) -> list[tuple[int, int]]: ...
    def relayed(self) -> list[tuple[int, int]]: ...

class RelayedPeer:
    """The newest member: the plan has it send to `others` older ones, none of which it can connect to."""

    def __init__(self, others: int, relayed: list[tuple[int, int]]) -> None: ...
    def refuses(self) -> str: ...
    def asks(self, seconds: float) -> list[tuple[float, int]]: ...

class RelayDesk:
    """The master's relay; descriptors are of sockets whose other ends the test holds."""

    def __init__(self, rate: int = 0, most_open: int = 512) -> None: ...
    def expect(
        self, one: bytes, other: bytes, token_of_one: bytes, token_of_other: bytes
    ) -> None: ...
    def enter(self, token: bytes, descriptor: int) -> bool: ...
    def end(self, one: bytes, other: bytes) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def run(self, seconds: float) -> None: ...

class SumsPlay:
    """Rank 0 of three that sum arrays, and what the others' links bring (cpp/tests/testing/hostile.cpp)."""

    def __init__(self, elements: int) -> None: ...
    def start(self, sequence: int) -> None: ...
    def word(self, peer: int, what: str, sequence: int, attempt: int, credit: int) -> str: ...
    def data(
        self,
        peer: int,
        sequence: int,
        segment: int,
        bytes: int,
        eager: bool = False,
        final: bool = False,
    ) -> str: ...
    def sends(self, to: int) -> int: ...

class Anteroom:
    """Connections that have not said who they are."""

    def __init__(self, most: int, most_from_one: int, most_bytes: int) -> None: ...
    def enter(self, connection: int, address: str) -> None: ...
    def holds(self, connection: int, bytes: int) -> None: ...
    def leave(self, connection: int) -> None: ...
    def crowded(self) -> int | None: ...
    def size(self) -> int: ...

def allowed(at_once: float, per_second: float, times: list[float]) -> int:
    """How many of what happens at these times is within a rate."""
