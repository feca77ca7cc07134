"""torch tensors, `DiLoCo` and `ddp_hook` for torch models, and the c10d backend "pccl".

Importing this package registers the backend: `torch.distributed.init_process_group("pccl")`.
"""

import torch.distributed as dist

from _pccl_torch import api_untraced, class_untraced
from pccl.adapters.torch import tensors
from pccl.adapters.torch.diloco import DiLoCo, DiLoCoKeywords
from pccl.adapters.torch.tensors import *  # noqa: F403

if dist.is_available():
    from pccl.adapters.torch import backend
    from pccl.adapters.torch.ddp import DDPState, ddp_hook

    backend.register()

class_untraced(DiLoCo)
api_untraced()  # for a program without the entry point, which imports pccl before torch

__all__ = ["DDPState", "DiLoCo", "DiLoCoKeywords", "ddp_hook"]
__all__ += tensors.__all__
