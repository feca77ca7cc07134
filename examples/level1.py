"""The explicit level: every phase of a run is a call.  `pccl run -n 3 -- python examples/level1.py`

Peers come in one by one, reduce together, and go on when one of them vanishes without a word.
"""

import os

import numpy as np

from pccl import Attribute, Communicator, PeerLost, ReduceOp, TooFewPeers

STEPS = 6
wanted = int(os.environ["PCCL_MIN_PEERS"])
number = int(os.environ["PCCL_LOCAL_RANK"])  # only to choose who vanishes


def world_size() -> int:
    return comm.get_attribute(Attribute.LOCAL_WORLD_SIZE)


# The first peer of a group is let in at once, later ones by the members' next update_topology().
with Communicator(os.environ["PCCL_MASTER"]) as comm:
    while world_size() < wanted:
        comm.update_topology()

    gradient = np.full(1000, 1.0 + number, np.float32)
    mean = np.empty_like(gradient)
    for step in range(STEPS):
        # All members get the same answer, so all of them take the same branch.
        if comm.are_peers_pending():
            comm.update_topology()
        if step == STEPS // 2 and number == wanted - 1 and wanted > 1:
            print(f"peer {number} vanishes", flush=True)
            os._exit(0)  # no close(), no goodbye: the others notice by themselves
        while True:
            try:
                info = comm.all_reduce(gradient, mean, op=ReduceOp.AVG)
            except PeerLost as error:  # `gradient` is as it was; all members see this once
                print(f"peer {number}, step {step}: {error.reason}", flush=True)
            except TooFewPeers:
                np.copyto(mean, gradient)  # alone: the mean is what we have
                print(f"peer {number}, step {step}: alone", flush=True)
                break
            else:
                print(
                    f"peer {number}, step {step}: mean {mean[0]:.3f} over {info.world_size} peers",
                    flush=True,
                )
                break
