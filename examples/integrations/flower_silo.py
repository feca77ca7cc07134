"""A silo of Flower with several machines: python flower_silo.py on all of them but one

A SuperNode on that one runs flower_silo:app. All have the PCCL_MASTER of the silo. Flower starts a
process for each round, which joins the machines that wait, and leaves.
"""

import time

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import pccl

app = ClientApp()


def train(weights: np.ndarray, begins: bool) -> np.ndarray:
    started = pccl.allgather(np.array([begins]))[:, 0]
    if started.any():  # else another machine of the silo has come
        weights = pccl.broadcast(weights, root=int(started.argmax()))
        for step in range(20):
            x = np.random.default_rng([step, pccl.rank()]).standard_normal((64, 4))
            weights -= 0.1 * pccl.allreduce(x.T @ (x @ weights - x.sum(1)) / 64, "avg")
    return weights


@app.train()
def fit(message: Message, context: Context) -> Message:
    pccl.init()
    pccl.admit()
    weights = train(message.content["arrays"].to_numpy_ndarrays()[0].copy(), True)
    metrics = {"num-examples": 20 * 64 * pccl.world_size(), "members": pccl.world_size()}
    pccl.shutdown()
    records = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(records), reply_to=message)


if __name__ == "__main__":
    pccl.init()
    while True:
        if pccl.admit():
            train(np.zeros(4), False)
        time.sleep(0.05)
