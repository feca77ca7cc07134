"""The native engine, as the Python layers see it (bindings in cpp/pccl/bindings/)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.quantize import Coding
from pccl.types import QuantizationOptions, ReduceOp, ReduceOperandDescriptor
from pccl.types import ReduceInfo as Reduced

__version__: str

def interface_addresses() -> list[str]:
    """Addresses of this host's interfaces that are up, loopback last; without link-local ones."""

def openssl() -> tuple[str, bool]:
    """Version of the OpenSSL in use, and whether it is a copy inside the module."""

def is_set(variable: str) -> bool:
    """Whether the environment has a value for it, and not an empty one."""

def long_path_congestion() -> str:
    """The congestion control that connections on long paths get by themselves.

    "": the system's.
    """

def shares_memory() -> bool:
    """Whether peers of one host can share memory on this system; if not, they use TCP."""

def shared_memory(size: int) -> npt.NDArray[np.uint8] | None:
    """Bytes that peers of the host may read where they are; None where the system refuses them."""

_Place = tuple[int, int, Sequence[int], Sequence[int], str, bool]
_Entry = tuple[str, str, Sequence[int], str, bool, Any, bool, _Place | None]

def find_ties(entries: Sequence[_Entry]) -> tuple[list[tuple[str, str]], str | None]:
    """Entries that are the same memory as one before them by name; and why these cannot be shared."""

WEIGHTS: str
"""What a weight may be, for errors."""

def as_weight(number: float) -> float:
    """The number; NaN for one that is no weight."""

def scale(dtype: int, values: Any, weight: float, products: Any) -> None:
    """A weighted mean's products: `values` of that dtype times the weight, zeros where it is not above 0.

    Both are flat C-contiguous uint8 views; products are float32 for floats of 8 to 32 bits,
    complex for complex numbers, else float64.
    """

def unscale(dtype: int, sums: Any, total: float, means: Any, done: Any = None) -> None:
    """Its quotients: sums of `scale`'s products, divided by the weights' sum and rounded to the dtype.

    `means` may be the memory of `sums` where elements have the same size. `done`: a byte that is set
    when they are divided; if it is set already, nothing happens.
    """

def diagnose(master: str, group: int, port: int, advertise: Sequence[str]) -> dict[str, Any]:
    """What the master and the members see of this host; see `peer/doctor.h`. Takes up to some 20 s."""

def xla_handler() -> Any:
    """The custom call "pccl_allreduce", for jax.ffi.register_ffi_target."""

def use_by_default(number: int) -> None:
    """The `Reducer._number` that compiled calls of communicator 0 use; 0 for none."""

def xla_tags() -> int:
    """The number of tags that compiled calls of open communicators have used, for tests."""

def with_default_floats(call: Callable[[], Any]) -> Any:
    """Calls it with the default floating-point environment: XLA's threads flush denormals to zero."""

def raise_xla_error(number: int) -> None:
    """Raises the failure that "[pccl error <number>]" in a message of XLA's stands for. None if it is too old."""

NAMES: str
"""What a peer's name may be, for errors."""

def is_name(text: str) -> bool: ...
def check_settings(function: str) -> None:
    """Raises InvalidArgument, which names the variable, if the engine would refuse a setting."""

def check_advertised(addresses: Sequence[str], function: str) -> None:
    """Raises InvalidArgument if the engine would refuse these addresses."""

OWN_GROUPS: int
"""Groups from this number on are made by pccl itself. A master's min_peers is not for them."""

FIRST_PAIR: int
"""The last of them, from this number on, are pairs of peers, on which the run does not depend."""

FIRST_DOOR: int
"""The last pairs, from this number on, are doors, where followers of a run come and go."""

def ask_status(address: str, secret: Secret | None = None) -> dict[str, Any]:
    """The status of the run whose master is there, without joining.

    `secret`: None: the environment's.

    `bindings/status.cpp` has the shape, docs/reference/status.md what each field means. Takes some 10 s at most.
    """

def command(address: str, kind: str, name: str = "") -> str:
    """Has that master carry out "kick", "drain", "pause-admission" or "resume-admission"; says what was done.

    `name`: of the peer, for the first two; or its id, whole or the first 8 digits. InvalidArgument: nothing was
    done, and why: there is no such peer, or there are several.
    """

class Secret:
    """A run's secret, hashed. Failures are raised as InvalidArgument of `function`."""

    @staticmethod
    def of(bytes: bytes, function: str) -> Secret: ...
    @staticmethod
    def from_file(path: str, function: str) -> Secret:
        """Without blanks around it."""

    @staticmethod
    def from_environment(function: str) -> Secret | None:
        """PCCL_SECRET, or the file that PCCL_SECRET_FILE names; None when neither is set.

        One that is set and empty is an error."""

    def status_key(self) -> bytes:
        """32 bytes derived from the secret, for readers of the status over HTTP. They cannot join with it."""

class Communicator:
    """One peer's part in a run. Every blocking method releases the GIL and obeys Ctrl-C.

    Failures are raised by calling `pccl.errors.from_engine(cause, result, func_name, reason, peer, waiting)`,
    where `cause` is the engine's code, `result` the explicit API's code of that call, `peer` 32 hex digits or "".
    `timeout` is in seconds; None waits as long as members make progress.
    """

    def __init__(
        self,
        master: str,
        *,
        peer_group: int,
        stripes: int,
        port: int,
        advertise: Sequence[str],
        replica: str = "",
        ranks_per_replica: int = 0,
        name: str = "",
        secret: Secret | None = None,
        quiet: bool = False,
    ) -> None: ...
    def join(self, *, min_peers: int, attempts: int, timeout: float | None, enter: bool) -> None:
        """Reaches the master and joins. `enter=True` (explicit API) returns when admitted as a member;
        else (simple API) when the group has started: as a member if it started with us, as a newcomer
        if it had started before."""

    def admit(self, timeout: float | None) -> bool:
        """The simple API's admission point; completes this peer's own operations first."""

    def stats(self) -> dict[str, Any]:
        """The fields of `pccl.types.RunStats` but the first three."""

    def on_change(
        self,
        callback: Callable[
            [int, int, list[str], list[str], list[tuple[str, str, str]]],
            list[Callable[[], object]],
        ]
        | None,
    ) -> None:
        """`callback(epoch, rank, ids, names, departures)` at the end of calls; it returns what to call then."""

    def settle(self, timeout: float | None) -> None:
        """Waits for this peer's own operations."""

    def update_topology(self, timeout: float | None) -> None:
        """The explicit API's admission point; PendingOperations with unfinished handles."""

    def peers_pending(self, timeout: float | None) -> bool: ...
    def optimize_topology(self, timeout: float | None) -> None: ...
    def topology(
        self,
    ) -> tuple[
        list[str],
        list[tuple[int, int]],
        list[tuple[bool, int, int]],
        list[int],
        list[tuple[int, int, list[int]]],
        list[int],
        list[int],
        list[tuple[int, int]],
    ]: ...
    def barrier(self, timeout: float | None) -> None: ...
    def overwrote(self) -> bool:
        """Whether the latest sync has failed and overwritten a part of the state."""

    def sync(
        self,
        entries: Sequence[_Entry],
        *,
        level: int,
        revision: int | None,
        strategy: int,
        progress: Callable[[int, int], None] | None,
        check: Callable[[list[tuple[str, str, tuple[int, ...], str, int]]], str | None] | None,
        timeout: float | None,
        lets_in: bool = True,
        overwrite: bool = False,
    ) -> Synced:
        """Makes a state equal on all members; `level=2` first lets newcomers in if `lets_in`.

        `entries`: (name, kind, shape, hint, loose, bytes, writable, place) each; bytes are a flat
        C-contiguous uint8 view, which receives new ones if `writable`. `hint` travels with an entry
        to members that lack it. `loose`: members may differ, newcomers receive it. `place`: where
        the caller's own elements lie; None: at the bytes, if these are writable.
        `strategy`: `pccl.types.SharedStateSyncStrategy`. `progress(done, wanted)` is called about
        ten times a second while bytes are to be received. `check(entries)` is asked whether what would
        be in `replaced` (with sizes in bytes) can be taken over; a sentence puts this peer out of the run.
        `overwrite`: received bytes go straight to writable entries.
        """

    def start(
        self,
        arrays: Sequence[tuple[Any, Any, int]],
        *,
        op: int,
        tag: int | None,
        level: int,
        rerun: bool,
        structure: bytes,
        description: str,
        timeout: float | None,
        kind: int = 0,
        root: int = 0,
        parts: int = 0,
        quantize: tuple[int, bool, bool, int] | None = None,
        residuals: Sequence[Any] = (),
        residual_members: int = 0,
        any_thread: bool = False,
        wait: bool = False,
        kept: object = None,
    ) -> Operation:
        """Starts one collective operation over a list of arrays; `wait`: returns, or raises, when it is over.

        `arrays`: (send, recv, dtype code) each; send and recv are flat C-contiguous uint8 views of equal size
        (send may be read-only and may be the same memory as recv: then it is in place). They and `kept`
        stay alive until the operation is over, also if nobody holds the Operation.
        `tag=None` matches by order. `level=1` raises TooFewPeers alone; `level=2` waits to be
        admitted first (a newcomer's first collective call; up to `timeout`) and works alone.
        `kind`: 0 all-reduce; 1 reduce-scatter: send has `parts` times the elements of recv; 2 all-gather: recv
        has `parts` times those of send; 3 broadcast from rank `root`; 4 all-to-all: both have `parts` parts.
        Ranks and `parts` are those of `membership()`. With `parts` other than 0 or the number of members it
        fails as PeerLost does.
        `rerun`: run again among the survivors when a member is lost. A broadcast fails all the same when its
        root is lost, and a reduce-scatter or all-to-all at any loss; an all-gather's results, of fewer
        members, take the first part of recv. `structure`: hash input for what must be
        equal on all members beyond sizes and dtypes (key paths, shapes); `description`: for error sentences.
        `quantize`: how floating-point arrays travel, `pccl.quantize.Codes`. `residuals`: by array, its error
        feedback: flat writable bytes, a float32 (of float64: float64) for each element; or None.
        `residual_members`: whose elements were added up when these errors were left out; an average of fewer
        members scales them down. 0: they fit any number.
        `any_thread`: the caller orders its threads' calls; else one thread makes all calls without a tag
        (explicit API: with tag 0), and InvalidUsage is raised in a second one while the first one lives.
        """

    def reduce_tree(
        self,
        tree: object,
        out: object,
        op: object,
        tag: int | None,
        timeout: float | None,
        coding: Coding | None,
    ) -> tuple[Any, ReduceInfo] | None:
        """A whole simple-API operation over arrays that need no preparation: its result, and how it went.

        None, and nothing is started, unless `tree` is a plain array or dicts, lists and tuples of such: a
        NumPy array of one of the twelve number types, C-contiguous and not empty; `out` has the same, writable,
        or is None for new ones; each pair is the same memory, or overlaps nothing else; and `op` is a `ReduceOp`
        or its name, and fits.
        Structure and description are those of `pccl.tree`, with the words of `coding`, which is
        `pccl.quantize.Coding`.
        """

    def start_tree(
        self,
        tree: object,
        out: object,
        op: object,
        tag: int | None,
        timeout: float | None,
        coding: Coding | None,
    ) -> tuple[Operation, Any] | None:
        """The same, begun; the result is complete when the operation is done."""

    def collect(
        self,
        *,
        kind: int,
        level: int,
        array: object,
        out: object,
        op: int,
        root: object,
        tag: int | None,
        timeout: float | None,
    ) -> tuple[Any, ReduceInfo] | None:
        """A whole operation of another kind over one such array: its result, and how it went. Returns None, and
        starts nothing, if the general path must take the call: as above, or if `out` shares memory with `array`
        other than in a broadcast in place."""

    def membership(self) -> tuple[int, int, int, list[str], int, list[str]]:
        """(epoch, rank, world_size, peer ids in rank order, peer_group, their replicas' names or none), as of the last
        call; rank -1 if no member."""

    def present(self) -> list[str]:
        """Ids of the members, in rank order, as of now: also of losses that no call has met yet."""

    def attribute(self, which: int) -> int: ...
    def unfinished(self) -> int:
        """Operations started and not finished."""

    def peer_id(self) -> str: ...
    def name(self) -> str: ...
    def drain(self) -> None:
        """Asks this peer to leave at its next admission point."""

    def expect_operation(self, seconds: float, nbytes: int, quantized: bool) -> None:
        """The next operation comes in about so many seconds, at most an hour, with arrays of `nbytes` bytes
        (0: not known): see `pccl.prepare`."""

    def wait_no_longer_than(self, quorum: int, grace_ms: int) -> None:
        """Lets the master put out who is late in a call once that many thousandths of the members
        have entered it, and the grace is over. 0: waits for all."""

    def end_process(self, failure: str, signal: int) -> None:
        """Leaves the run and ends this process by that signal, whatever handles it."""

    def draining(self) -> bool:
        """Whether it was asked to leave at its next admission point."""

    def is_open(self) -> bool:
        """Joined, and neither closed, evicted nor cut off."""

    def close(self, failure: str = "") -> None:
        """Leaves the run. Idempotent. `failure`: why, when its work was not done; its replica goes with it at once."""

class Reducer:
    """The base of `pccl.Communicator`: what is native of it.

    `_number`: no other communicator of this process has it; compiled programs know it by that.
    """

    _number: int

    def _attach(self, engine: object) -> None:
        """The engine that `all_reduce` goes to directly. Anything else: to `_all_reduce`, always."""

    def all_reduce(
        self,
        send: Any,
        recv: Any,
        *,
        op: ReduceOp | str,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        timeout: float | None = None,
    ) -> Reduced:
        """Reduces `send` over all members into `recv`, and waits.

        Args:
            send: NumPy array (or CPU torch tensor) of numbers, any shape. Unchanged, unless `recv`
                is the same memory.
            recv: Array of the same kind, dtype and number of elements. May be `send`: after a
                failure it is as before.
            op: How elements are combined.
            tag: Members' calls with equal tags meet, in the order of each member's calls.
            operand_descriptor: Default: the arrays' own dtype. Another dtype is refused.
            quantization_options: Members must ask for the same. Between hosts,
                floating-point arrays of 64 elements and more travel in these fewer bits.
            timeout: Seconds for the whole call. None waits as long as members make progress.

        Raises:
            TooFewPeers: Alone in the group.
            PeerLost: A member was lost (RANK_CONNECTION_LOST); update the topology and call again.
            MismatchedCall: Members disagree on count, dtype or op.
            InvalidArgument: The arrays do not fit together.
        """

class Synced:
    revision: int
    epoch: int
    members: list[str]
    tx_bytes: int
    rx_bytes: int
    written: list[str]
    replaced: list[tuple[str, str, tuple[int, ...], str, Any]]
    diverged: list[tuple[str, list[str]]]

    def finish(self) -> None:
        """Says that what is new was taken over; until then this peer is a newcomer in the next sync.
        Raises what interrupted the call when it could not be stopped any more."""

class Operation:
    def wait(self, timeout: float | None) -> ReduceInfo:
        """Blocks until the verdict; raises the failure. May be called again, from any thread."""

    def done(self) -> bool: ...
    def contributors(self) -> int:
        """The number of members whose arrays are in the result; 0: it failed, or is not over."""

class ReduceInfo:
    world_size: int
    contributors: Sequence[str]
    epoch: int
    attempts: int
    tx_bytes: int
    rx_bytes: int
    bytes: int
    seconds: float
    waiting_seconds: float
    moving_seconds: float

class Master:
    def __init__(
        self,
        listen: str,
        secret: Secret | None = None,
        min_peers: int = 1,
        masters: int = 1,
        index: int = 0,
    ) -> None: ...
    def run(self) -> None:
        """Binds and serves on a thread of its own; returns at once."""

    def address(self) -> str:
        """host:port really bound."""

    def status(self) -> dict[str, Any]:
        """As `ask_status`, from this master itself. Any thread."""

    def interrupt(self) -> None: ...
    def wait(self, timeout: float | None) -> bool:
        """True when it has stopped. Releases the GIL, obeys Ctrl-C."""

    def departed(self, peer: Communicator, timeout: float | None) -> bool:
        """True when this peer, which has left, needs this master no more: nor do the others, to
        learn of it. Or when the master has stopped. Releases the GIL, obeys Ctrl-C."""

def parse_masters(text: str, function: str) -> list[tuple[str, int]]:
    """The masters' addresses, comma-separated, as (host, port)."""
