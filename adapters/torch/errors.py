"""pccl's errors as users of torch.distributed catch them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch.distributed as dist

from pccl import errors  # as a module: this one's names are those of the classes made below


def _twin(cls: type[errors.PCCLError]) -> type[errors.PCCLError]:
    """A class that is both `cls` and torch's DistBackendError, which is a RuntimeError."""
    members: dict[str, Any] = {"__module__": __name__, "__doc__": cls.__doc__}
    if issubclass(cls, errors.Timeout):
        members["__str__"] = lambda self: f"Timed out: {cls.__str__(self)}"
    return type(cls.__name__, (cls, dist.DistBackendError), members)


_classes = {
    cls: _twin(cls)
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.PCCLError)
}
# Pickle, which PyTorch's launchers and queues use, finds them here.
for _made in _classes.values():
    setattr(sys.modules[__name__], _made.__name__, _made)


def as_torch_error(error: Exception) -> Exception:
    """A pccl error as one that `except RuntimeError` also catches; any other error as it is."""
    made_of = _classes.get(type(error)) if isinstance(error, errors.PCCLError) else None
    if made_of is None or not isinstance(error, errors.PCCLError):
        return error
    made = made_of(error.result, error.func_name, error.reason, peer=error.peer)
    made.__dict__.update(error.__dict__)
    return made


def refused(func: str, sentence: str) -> Exception:
    """A wrong argument: a ValueError, and the RuntimeError that c10d's own backends raise."""
    return as_torch_error(errors.InvalidArgument.because(func, sentence))


def not_supported(func: str, sentence: str) -> Exception:
    """A call that backend pccl cannot make: NotSupported, and torch's DistBackendError."""
    return as_torch_error(errors.NotSupported.because(func, sentence))


def fresh(error: Exception) -> Exception:
    """A copy of the error without a traceback, to be raised.

    A traceback keeps the callers' frames and all that they hold. For an error that a work keeps,
    that includes the work itself, in a cycle through C++ that the garbage collector does not see.
    """
    try:
        made = copy.copy(error)
    except Exception:  # a class whose instances cannot be copied
        made = RuntimeError(f"{type(error).__name__}: {error}")
    return made.with_traceback(None)
