"""A run's state in a file: what `pccl.sync` shares, with its revision, as safetensors.

    state, _ = checkpoint.resume("run", state)  # as it is, if there is no checkpoint yet
    state = pccl.sync(state, revision=state["step"])
    ...
    if pccl.rank() == 0:
        name = f"run/{state['step']}.safetensors"
        checkpoint.save(name, state, revision=state["step"], keep=3)

Arrays are tensors of the file, named by their key paths; any reader of safetensors can read them.
Its metadata has numbers, text, None, and how to make what the reader's state lacks.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pccl import _core, _settings
from pccl._state import PYTHON, State, decode, dtype_of, encode
from pccl.errors import InvalidArgument, NotSupported
from pccl.frameworks import Array

__all__ = ["SUFFIX", "CheckpointError", "latest", "load", "resume", "save"]

SUFFIX = ".safetensors"

_FORMAT = "1"
_REVISION = "pccl.revision"  # keys of the file's metadata
_ENTRIES = "pccl.entries"
_VERSION = "pccl.format"
_UNFINISHED = ".pccl-save"  # ends the names of folders of saves
# Seconds from which on such a folder without a lock is nobody's: some file systems that machines
# share keep locks to one machine.
_ABANDONED = 3600.0
_NAMED = 3  # differences that an error names before it only counts

# Dtypes that the format has. Arrays of others are stored as bytes.
_DTYPES = {
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
}

_Path = str | os.PathLike[str]
_Tree = TypeVar("_Tree")


class CheckpointError(InvalidArgument):
    """The file is no whole checkpoint, or not one of such a state. Nothing was changed."""


class _Entry(NamedTuple):
    """An array or value of the state, as the metadata has it."""

    name: str
    kind: str
    shape: list[int]
    hint: str  # how to make it where it is missing
    value: Any  # of a Python value, as JSON; None for arrays


def save(path: _Path, state: object, *, revision: int, keep: int | None = None) -> Path:
    """Writes `state` to a file, which is whole or not there.

    This holds after a power failure, and when several members save at once. One member is enough,
    since the state is equal on all. No other member waits for it. The unfinished file of a process
    that was killed is removed by the first save there an hour later, if the file system has locks.

    Args:
        path: The file to replace; best with the revision in its name. It must end in ".safetensors"
            for `latest` to find it. Missing folders are made.
        state: As for `pccl.sync`.
        revision: Of this state: `SyncInfo.revision` of the sync that it comes from.
        keep: Number of checkpoints to leave in that folder: those of the highest revisions, and
            this one. Default: all.

    Returns:
        The path.

    Raises:
        InvalidArgument: A leaf cannot be saved; names its path. Or `revision` is not from 0 to
            2^63 - 1, or `keep` no positive integer.
        NotSupported: safetensors is not installed.
        OSError: The file could not be written. An earlier file is unchanged.
    """
    func = "checkpoint.save"
    safetensors = _safetensors(func)
    revision = _settings.integer(revision, "revision", func, 0, 2**63 - 1)
    if keep is not None:
        keep = _settings.integer(keep, "keep", func, 1, 2**63 - 1)
    entries, tensors = [], {}
    memory: list[Array] = []  # what the tensors point to
    for name, kind, shape, hint, _, data, _, _ in State(state, func).entries:
        if kind.startswith(PYTHON):
            entries.append(_Entry(name, kind, [], hint, _to_json(decode(kind, data))))
            continue
        entries.append(_Entry(name, kind, list(shape), hint, None))
        dtype = dtype_of(kind)
        plain = dtype if dtype in _DTYPES else "uint8"
        memory.append(data)
        tensors[name] = safetensors.TensorSpec(
            dtype=plain,
            shape=shape if dtype in _DTYPES else [data.size],
            data_ptr=data.ctypes.data,
            data_len=data.size,
        )
    metadata = {
        _VERSION: _FORMAT,
        _REVISION: str(revision),
        _ENTRIES: json.dumps(entries, separators=(",", ":")),
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(target) as temporary:
        try:
            safetensors.serialize_file(tensors, temporary, metadata)
        except safetensors.SafetensorError as error:
            raise OSError(f"{target} could not be written: {error}") from error
    if keep is not None:
        _prune(target, keep)
    return target


def load(path: _Path, state: _Tree) -> tuple[_Tree, int]:
    """Reads a checkpoint into `state`.

    `state` may lack entries, as a newcomer's in `pccl.sync`: an optimizer may not have stepped yet.
    Arrays are written in place where possible. Objects get theirs through `load_state_dict`.

    Args:
        path: The file.
        state: Has the structure, shapes and dtypes that were saved.

    Returns:
        The state, and its revision: for the first `pccl.sync(state, revision=revision)`.

    Raises:
        CheckpointError: The file is damaged or of another state; names the differences. Nothing was
            changed.
        InvalidArgument: A leaf of `state` cannot be shared, or two of its arrays overlap; names
            their paths.
        NotSupported: safetensors is not installed, or a dtype is not known here.
        OSError: The file cannot be read.
        Exception: An error of an object's `load_state_dict` passes through.
    """
    func = "checkpoint.load"
    with _opened(path, func) as (file, entries, revision):
        return _load(path, file, entries, state, func), revision


def _load(
    path: _Path, file: BufferedReader, entries: list[_Entry], state: _Tree, func: str
) -> _Tree:
    shared = State(state, func)
    own = {name: (kind, shape) for name, kind, shape, *_ in shared.entries}
    differences = list(_differences(entries, own))
    if differences:
        more = len(differences) - _NAMED
        shown = differences[:_NAMED] + ([f"{more} more differences"] if more > 0 else [])
        raise _refused(path, func, f": {'; '.join(shown)}")
    data = _read_data(path, file, entries, func)
    offered = [
        (e.name, e.kind, e.shape, e.hint, bytes_.size)
        for e, bytes_ in zip(entries, data, strict=True)
    ]
    misfit = shared.check(offered)
    if misfit is not None:
        sentence = misfit.replace(" of the run cannot", " of the checkpoint cannot")
        raise _refused(path, func, f": {sentence}")
    ties, flaw = _core.find_ties(shared.entries)
    if flaw is not None:
        raise InvalidArgument.because(func, f"the state cannot be loaded: {flaw}")
    saved = {e.name: bytes_ for e, bytes_ in zip(entries, data, strict=True)}
    for name, other in ties:
        if not np.array_equal(saved[name], saved[other]):
            sentence = f": {name} and {other} are the same memory here, and differ there"
            raise _refused(path, func, sentence)
    replaced = [(e.name, e.kind, e.shape, e.hint, saved[e.name]) for e in entries]
    result: _Tree = shared.finish([], replaced)
    return result


def resume(folder: _Path, state: _Tree) -> tuple[_Tree, int | None]:
    """Reads the checkpoint of the highest revision in `folder` into `state`, if there is one.

    As `latest` and `load`. Another process may save to that folder and remove old files meanwhile.

    Args:
        folder: The folder of the checkpoints.
        state: As for `load`.

    Returns:
        The state, and its revision for the first `pccl.sync(state, revision=revision)`. Without a
        checkpoint, or such a folder: the state as it is, and None.

    Raises:
        CheckpointError, InvalidArgument, NotSupported, OSError, Exception: As `load`.
    """
    func = "checkpoint.load"
    lost: FileNotFoundError | None = None
    while (found := latest(folder)) is not None:
        with ExitStack() as stack:
            try:
                file, entries, revision = stack.enter_context(_opened(found, func))
            except FileNotFoundError as error:
                lost = error  # there may be a newer one, or one of that name again
                continue
            return _load(found, file, entries, state, func), revision
    if lost is not None:
        raise lost
    return state, None


def latest(folder: _Path) -> Path | None:
    """The checkpoint of the highest revision in `folder`; None if there is none, or no such folder.

    Reads the beginning of every ".safetensors" file. Damaged ones, and those that `save` has not
    written, do not count.

    Raises:
        NotSupported: safetensors is not installed.
    """
    _safetensors("checkpoint.latest")
    found = _checkpoints(Path(folder))
    return max(found)[1] if found else None


def _safetensors(func: str) -> Any:
    try:
        module = importlib.import_module("safetensors")
    except ImportError:
        module = None
    if module is None or not hasattr(module, "TensorSpec"):
        sentence = "safetensors 0.8 or later is needed: pip install 'pccl-collectives[checkpoint]'"
        raise NotSupported.because(func, sentence)
    return module


def _to_json(value: object) -> object:
    """A value as exact JSON: Python reads no long decimal numbers, and JSON has no infinity."""
    if type(value) is int:
        return f"{value:x}"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return [value.encode("utf-8", "surrogatepass").hex()]  # a reader would join surrogates
    return value.hex() if isinstance(value, float) else value


def _from_json(kind: str, value: Any) -> Array:
    """Its bytes in the shared state."""
    name = kind.removeprefix(PYTHON)
    if name == "int":
        value = int(value, 16)
    elif name == "float":
        value = float.fromhex(value)
    elif isinstance(value, list):
        value = bytes.fromhex(value[0]).decode("utf-8", "surrogatepass")
    encoded = encode(value)
    if encoded is None or encoded[0] != kind:
        raise ValueError(f"{value!r} is no {name}")
    return np.frombuffer(encoded[1], np.uint8)


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A temporary file that replaces `target` at the end, or is removed."""
    with _own_folder(target) as folder:
        temporary = folder / target.name
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        yield temporary
        with open(temporary, "r+b") as file:
            os.fchmod(file.fileno(), mode & 0o777)  # safetensors may have replaced the file
            os.fsync(file.fileno())
        os.replace(temporary, target)
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(parent)  # the name, too, is on the disk
    finally:
        os.close(parent)


@contextmanager
def _own_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` for one save. Removes those of saves that were killed."""
    # The name is this process's own, and `latest` does not look into it.
    folder = target.with_name(f".{secrets.token_hex(8)}{_UNFINISHED}")
    folder.mkdir()
    try:
        with ExitStack() as lock:
            with suppress(OSError):  # a file system without locks: nobody removes it
                lock.enter_context(_locked(folder, 0))  # one that looks at it is soon done
            _remove_abandoned(folder)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(own: Path) -> None:
    now = own.stat().st_mtime  # by the clock of the file system
    for folder in own.parent.glob(f".*{_UNFINISHED}"):
        with suppress(OSError):
            if now - folder.stat().st_mtime > _ABANDONED:
                with _locked(folder, fcntl.LOCK_NB):
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """A lock that ends with the process. LOCK_NB: an OSError if there is one already."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(opened)


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    missing: set[Path] = set()
    while True:
        found, missing_before, missing = [], missing, set()
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            try:
                found.append((_read_metadata(path, "checkpoint.latest")[1], path))
            except FileNotFoundError:
                missing.add(path)
            except (CheckpointError, OSError):
                pass
        # Another process may have replaced those that are missing. One that is missing again is a
        # link to nothing.
        if found or missing <= missing_before:
            return found


def _refused(path: _Path, func: str, sentence: str) -> CheckpointError:
    return CheckpointError.because(func, f"{os.fspath(path)}{sentence}")


@contextmanager
def _opened(path: _Path, func: str) -> Iterator[tuple[BufferedReader, list[_Entry], int]]:
    """A file with its entries and revision, all of them of one save."""
    _safetensors(func)
    while True:
        with open(path, "rb") as file:
            entries, revision = _read_metadata(path, func)
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                yield file, entries, revision
                return


def _prune(written: Path, keep: int) -> None:
    found = sorted(_checkpoints(written.parent))
    for _, path in found[:-keep]:
        if path != written:
            path.unlink(missing_ok=True)  # another member may do the same


def _read_metadata(path: _Path, func: str) -> tuple[list[_Entry], int]:
    """The entries of a file, and its revision.

    Raises:
        CheckpointError: It is no whole checkpoint.
    """
    safetensors = _safetensors(func)
    with open(path, "rb"):  # errors of the file system are OSErrors
        pass
    try:
        with safetensors.safe_open(os.fspath(path), framework="numpy") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
    except safetensors.SafetensorError as error:
        sentence = f" is damaged, or no safetensors file: {error}"
        raise _refused(path, func, sentence) from error
    if metadata.get(_VERSION) != _FORMAT:
        raise _refused(path, func, " is no checkpoint, or of another version of pccl")
    try:
        entries = [_Entry(*entry) for entry in json.loads(metadata[_ENTRIES])]
        revision = int(metadata[_REVISION])
        arrays = {entry.name for entry in entries if not entry.kind.startswith(PYTHON)}
        if arrays != names:
            raise ValueError("names")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        sentence = " is damaged: its tensors and its metadata disagree"
        raise _refused(path, func, sentence) from error
    return entries, revision


def _differences(
    entries: list[_Entry], own: dict[str, tuple[str, tuple[int, ...]]]
) -> Iterator[str]:
    """The differences between a checkpoint and a state with entries `own`, in words."""
    saved = {entry.name for entry in entries}
    for name, (kind, shape) in own.items():
        if name not in saved:
            yield f"state{name} is {_words(kind, shape)}, and the checkpoint has none"
    for entry in entries:
        if entry.name not in own:
            continue  # may be made; `State.check` knows
        kind, shape = own[entry.name]
        both_values = kind.startswith(PYTHON) and entry.kind.startswith(PYTHON)
        if not both_values and (kind, shape) != (entry.kind, tuple(entry.shape)):
            there = _words(entry.kind, entry.shape)
            yield f"state{entry.name} is {_words(kind, shape)}, and {there} in the checkpoint"


def _words(kind: str, shape: list[int] | tuple[int, ...]) -> str:
    if kind.startswith(PYTHON):
        return kind.removeprefix(PYTHON)
    return f"{kind}[{','.join(map(str, shape))}]"


def _read_data(path: _Path, file: BufferedReader, entries: list[_Entry], func: str) -> list[Array]:
    """The bytes of each entry, in memory of its own: NumPy lacks some of the dtypes."""
    data = []
    try:
        header_size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_size))
        for entry in entries:
            if entry.kind.startswith(PYTHON):
                data.append(_from_json(entry.kind, entry.value))
                continue
            first, end = header[entry.name]["data_offsets"]
            made = np.empty(end - first, np.uint8)
            file.seek(8 + header_size + first)
            if file.readinto(made.data) != made.size:
                raise ValueError(f"state{entry.name} is cut off")
            data.append(made)
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(path, func, f" is damaged: {error}") from error
    return data
