"""A peer of check_containers.sh: reduces with another one, alone after its loss, and again.

Prints "together", "alone" and "together again" at these points, and a digest of its state at the
end. A newcomer receives the state, with the point at which the run is.
"""

import hashlib

import numpy as np

import pccl

AT = [2, 1, 2]  # members at each point
NAMES = ["together", "alone", "together again"]

state = {"point": 0, "left": 3, "sum": np.zeros(100_000)}
pccl.init()
while state["left"]:
    if pccl.admit():
        state = pccl.sync(state)
    # The sums are the same on all members, and so are all decisions below.
    sums = pccl.allreduce({"members": np.ones(1), "values": np.arange(100_000.0)})
    members = int(sums["members"][0])
    assert np.array_equal(sums["values"], members * np.arange(100_000.0))
    state["sum"] += sums["values"]
    if state["point"] == len(AT):
        state["left"] -= 1
    elif members == AT[state["point"]]:
        print(NAMES[state["point"]], flush=True)
        state["point"] += 1
print("digest", hashlib.sha256(state["sum"].tobytes()).hexdigest())
pccl.shutdown()
