import itertools
import os

import torch
import torch.distributed as dist

from pccl import checkpoint
from pccl.adapters.torch import DiLoCo
from pccl.data import ElasticSampler

os.environ["REPLICA"] = "a"
model = torch.nn.Linear(3, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
make_optimizer = torch.optim.AdamW
batches = itertools.repeat(torch.ones(4, 3))
examples, batch_size, rounds = torch.ones(64, 3), 8, 1
sampler = ElasticSampler(64, batch_size=8)
diloco = DiLoCo(model, inner, sync_every=100, join=False)


def loss_of(model, batch):
    return model(batch).square().mean()
