"""The `pccl` command; see `pccl.tools.cli`."""

from pccl.tools.cli import main

__all__ = ["main"]
