import pccl
