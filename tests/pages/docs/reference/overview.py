import numpy as np

import pccl

steps, state = 2, {"step": 0, "w": np.zeros(3)}


def gradients(state):
    return np.ones(3)


def update(state, mean):
    state["w"] -= mean
