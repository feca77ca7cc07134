"""torch tensors, `DiLoCo` and `ddp_hook` for torch models, and the torch.distributed backend "pccl".

Importing this package registers the backend: `torch.distributed.init_process_group("pccl")`.
"""

import torch.distributed as dist

from pccl.adapters.torch.diloco import DiLoCo
from pccl.adapters.torch.tensors import (
    adopt,
    device_of,
    devices_in_use,
    flatten,
    from_buffers,
    is_spread,
    on_device,
    recognises,
    share,
    stage,
    to_buffers,
)

if dist.is_available():
    from pccl.adapters.torch import backend
    from pccl.adapters.torch.ddp import DDPState, ddp_hook

    backend.register()

__all__ = [
    "DDPState",
    "DiLoCo",
    "adopt",
    "ddp_hook",
    "device_of",
    "devices_in_use",
    "flatten",
    "from_buffers",
    "is_spread",
    "on_device",
    "recognises",
    "share",
    "stage",
    "to_buffers",
]
