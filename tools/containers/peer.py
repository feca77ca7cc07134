"""A peer of check_containers.sh: reduces with another one, alone after its loss, and again.

Prints "together", "alone" and "together again" at these points. Prints a digest of its state at
the end, and whether the two have exchanged their last values over the loopback interface. A
newcomer receives the state, with the point at which the run is.
"""

import hashlib
from pathlib import Path

import numpy as np

import pccl

AT = [2, 1, 2]  # members at each point
NAMES = ["together", "alone", "together again"]

LAST = 50  # steps at the end


def loopback_bytes() -> int:
    (line,) = [each for each in Path("/proc/net/dev").read_text().splitlines() if "lo:" in each]
    return int(line.split()[1])


state = {"point": 0, "left": LAST, "sum": np.zeros(100_000)}
before = 0
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
        before = before or loopback_bytes()
        state["left"] -= 1
    elif members == AT[state["point"]]:
        print(NAMES[state["point"]], flush=True)
        state["point"] += 1
print("digest", hashlib.sha256(state["sum"].tobytes()).hexdigest())
exchanged = loopback_bytes() - before > LAST * state["sum"].nbytes / 2
print("over the loopback interface" if exchanged else "not over the loopback interface")
pccl.shutdown()
