from pathlib import Path

import torch

from pccl.data import ElasticSampler

Path("run").mkdir(exist_ok=True)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = ElasticSampler(10, batch_size=1)
steps = 1000


def train_one_step(state):
    state["step"] = 999  # one more, and a checkpoint is due
