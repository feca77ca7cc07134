"""Elastic data, and what follows the number of members; see the modules in `pccl.training`."""

from pccl.training.data import ElasticSampler
from pccl.training.learning_rate import learning_rate
from pccl.training.micro_batches import micro_batches
from pccl.training.permutation import permuted

__all__ = ["ElasticSampler", "learning_rate", "micro_batches", "permuted"]
