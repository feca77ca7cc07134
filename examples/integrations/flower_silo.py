"""A silo of Flower: python flower_silo.py on all machines but one, which has a SuperNode."""

import sys
import time

import numpy as np

try:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install flwr", file=sys.stderr)
    sys.exit(2)

import pccl

app = ClientApp()  # the SuperNode runs it, with the PCCL_MASTER of its silo


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
    with pccl.init():
        pccl.admit()
        arrays = ArrayRecord([train(message.content["arrays"].to_numpy_ndarrays()[0].copy(), True)])
        sizes = {"num-examples": 20 * 64 * pccl.world_size(), "members": pccl.world_size()}
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord(sizes)}), reply_to=message)


if __name__ == "__main__":
    pccl.init()
    while True:
        if pccl.admit():
            train(np.zeros(4), False)
        time.sleep(0.05)
