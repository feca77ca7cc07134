import pccl

steps, state = 2, {"step": 0}


def train_one_step(state):
    pccl.allreduce([1.0])
