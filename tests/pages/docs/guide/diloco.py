import itertools

import jax.numpy as jnp
import torch

import pccl.adapters.jax
from pccl.adapters.torch import DiLoCo

model = torch.nn.Linear(3, 1)
inner = torch.optim.AdamW(model.parameters())
params, moments = {"w": jnp.zeros(3)}, None
batches = itertools.repeat(torch.ones(4, 3))
rounds, checkpoint = 2, None


def loss_of(model, batch):
    return model(batch).square().mean()


def train_step(params, moments, batch):
    return {"w": params["w"] + 1}, moments
