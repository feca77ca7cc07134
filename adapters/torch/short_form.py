"""The two forms of a process group's calls.

c10d calls a backend with lists of tensors and options. Programs may also call the group itself with
a tensor, a rank, an op and a timeout, as in `group.broadcast(tensor, 0)`. torch's C++ class takes
both forms; methods of a Python class get what the caller wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_FIELDS = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}  # of options, by argument


def short_form(
    options: type, lists: int, *arguments: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a method that takes `lists` lists of tensors and `options` also take the short form.

    The method always gets options: the defaults, where the caller gave none.

    Args:
        options: The class of the options.
        lists: Number of lists of tensors.
        arguments: Those of the short form that are not tensors, in their order.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            tensors = [*given[:lists]]
            rest = dict(zip(["opts", *arguments[1:]], given[lists:], strict=False))
            first = rest.get("opts")
            is_long = isinstance(first, options) or "opts" in named
            short = any(isinstance(tensor, torch.Tensor) for tensor in tensors)
            if is_long or (not short and first is None and not named):
                made = named.pop("opts", first) or options()
                return method(self, *given[:lists], *given[lists + 1 :], opts=made, **named)
            if first is not None:
                rest[arguments[0]] = first
            rest.pop("opts", None)
            rest.update(named)
            # The outputs come first, in whatever order they were named.
            others = sorted(set(rest) - set(arguments), key=lambda name: not name.startswith("out"))
            tensors += [rest.pop(name) for name in others]
            made = options()
            for name, value in rest.items():
                if value is not None:
                    setattr(made, _FIELDS[name], value)
            if any(isinstance(tensor, torch.Tensor) for tensor in tensors):
                tensors = [[tensor] for tensor in tensors]
            return method(self, *tensors, made)

        return call

    return decorate
