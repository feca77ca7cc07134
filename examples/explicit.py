"""The explicit API: every phase of a run is a call.  `pccl run -n 3 -- python examples/explicit.py`

Peers come in one by one, receive the weights, reduce together, and go on when one of them vanishes
without a word. A peer that starts later joins the same way.
"""

import os
import time
import zlib

import numpy as np

from pccl import Attribute, Communicator, PeerLost, ReduceOp, SharedState, TensorInfo, TooFewPeers

STEPS = 6
wanted = int(os.environ["PCCL_MIN_PEERS"])
number = int(os.environ["PCCL_LOCAL_RANK"])  # only to tell them apart

weights = np.full(1000, number, np.float32)  # the first peer's will be everybody's
state = SharedState([TensorInfo.from_numpy(weights, "weights")])
gradient = np.full(1000, 1.0 + number, np.float32)
mean = np.empty_like(gradient)

# The first peer of a group is let in at once, later ones by the members' next update_topology().
with Communicator(os.environ["PCCL_MASTER"]) as comm:
    joining = True
    while True:
        # Members ask whether anybody waits; all get the same answer.
        if joining or comm.are_peers_pending():
            # Waiting peers come in. One place in the loop: a newcomer's first call returns at once,
            # so that its next call is the members' next one.
            comm.update_topology()

            # Newcomers receive weights and revision; members that are in step move no byte.
            synced = comm.sync_shared_state(state)
            if synced.rx_bytes:
                print(f"peer {number} received {synced.rx_bytes} bytes", flush=True)
            joining = False

        # Here, not in the loop's head: a peer that comes during the last step gets the result.
        if state.revision == STEPS:
            break

        # Now revision and size are the same on all members, so all of them take the same branch.
        if state.revision == 0 and comm.get_attribute(Attribute.LOCAL_WORLD_SIZE) < wanted:
            time.sleep(0.05)
            continue

        if state.revision == STEPS // 2 and number == wanted - 1 and wanted > 1:
            print(f"peer {number} vanishes", flush=True)
            os._exit(0)  # no close(), no goodbye: the others notice by themselves
        while True:
            try:
                world = comm.all_reduce(gradient, mean, op=ReduceOp.AVG).world_size
                break
            except PeerLost as error:  # `gradient` is as it was; all members see this once
                print(f"peer {number}, step {state.revision}: {error.reason}", flush=True)
            except TooFewPeers:
                np.copyto(mean, gradient)  # alone: the mean is what we have
                world = 1
                break
        print(
            f"peer {number}, step {state.revision}: mean {mean[0]:.3f} over {world} peers",
            flush=True,
        )
        weights -= 0.1 * mean
        state.push_revision()
    print(f"peer {number} ends with weights {zlib.crc32(weights.tobytes()):08x}", flush=True)
