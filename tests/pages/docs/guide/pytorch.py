import torch
from torch.nn.parallel import DistributedDataParallel

import pccl

model = torch.nn.Linear(3, 1)
model(torch.ones(2, 3)).sum().backward()
tensor = torch.ones(4)
