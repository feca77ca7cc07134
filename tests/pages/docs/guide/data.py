import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import pccl
from pccl.data import ElasticSampler

weights = np.zeros(3, np.float32)
examples = np.ones((64, 3), np.float32)
data = TensorDataset(torch.ones(64, 3), torch.ones(64))
sampler = ElasticSampler(64, batch_size=32)
state = {"weights": weights, "sampler": sampler}
model = torch.nn.Linear(3, 1)
steps, batch_size, epochs = 2, 16, 1


def gradients(model, batch=None):
    return np.ones(3, np.float32)


def update(state, mean):
    state["weights"] -= 0.1 * mean
