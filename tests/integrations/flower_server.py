"""The server of flower_run.py: four rounds of FedAvg over two silos."""

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    average = FedAvg(fraction_evaluate=0.0, min_train_nodes=2, min_available_nodes=2)
    found = average.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(4)]), num_rounds=4)
    members = [dict(one)["members"] for one in found.train_metrics_clientapp.values()]
    print("ends with", *found.arrays.to_numpy_ndarrays()[0], "members", *members, flush=True)
