"""Elastic data; see `pccl.training.data` and `pccl.training.micro_batches`."""

from pccl.training.data import ElasticSampler
from pccl.training.micro_batches import micro_batches
from pccl.training.permutation import permuted

__all__ = ["ElasticSampler", "micro_batches", "permuted"]
