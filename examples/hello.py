"""The smallest program: `pccl run -n 4 -- python examples/hello.py`."""

import numpy as np

import pccl

pccl.init()  # finds the master through PCCL_MASTER, which `pccl run` sets
mine = np.full(3, pccl.rank() + 1, np.float32)
total = pccl.allreduce(mine)  # the same bytes on every peer
print(f"rank {pccl.rank()} of {pccl.world_size()} gave {mine} and got {total}")
