"""Elastic data; see `pccl.training.data`."""

from pccl.training.data import ElasticSampler
from pccl.training.permutation import permuted

__all__ = ["ElasticSampler", "permuted"]
