"""Elastic data; see `pccl.training.data`."""

from pccl.training.data import ElasticSampler, permuted

__all__ = ["ElasticSampler", "permuted"]
