"""Four peers learn handwritten digits. Kill one, start another: all end with the same weights.

    pccl run -n 4 --elastic --show-join -- python examples/kill_and_join.py

While it runs, `kill -9` a pid in a second terminal, and start there the line after "to join:".
"""

import hashlib
import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the peers share this machine's cores

import numpy as np
from rich import print

import pccl

sys.stdout.reconfigure(errors="replace")  # there are terminals without ●
try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.stderr.write(f"{error.name} is missing: pip install 'pccl-collectives[demo]'\n")
    sys.exit(2)

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
pixels, labels = load_digits(return_X_y=True)  # 1797 of 8 x 8 pixels; the last 297 are held out
order = np.random.default_rng(0).permutation(1797)
images, wanted = np.float32(pixels[order] / 16), np.eye(10, dtype=np.float32)[labels[order]]

pccl.init()  # finds the master through PCCL_MASTER
draw = np.random.default_rng().standard_normal  # each peer draws other weights; see `sync`
state = {"step": 0, "w1": draw((64, 256), np.float32) / 5, "w2": draw((256, 10), np.float32) / 10}
while True:
    if pccl.admit():  # newcomers come in here, and receive the others' state
        state, got = pccl.sync(state, return_info=True)
        if got.rx_bytes:
            print(f"pid {os.getpid()}  received {got.rx_bytes / 1e3:.0f} kB of state")
    if state["step"] == STEPS:
        break
    batch = np.random.default_rng(state["step"]).integers(1500, size=512)  # the same for all
    mine = batch[pccl.rank() :: pccl.world_size()]  # this peer's share of it
    hidden = np.maximum(images[mine] @ state["w1"], 0)
    odds = np.exp(hidden @ state["w2"])
    odds /= odds.sum(axis=1, keepdims=True)
    error = (odds - wanted[mine]) / len(mine)
    gradients = [images[mine].T @ ((error @ state["w2"].T) * (hidden > 0)), hidden.T @ error]
    loss = -np.log(odds[wanted[mine] == 1]).mean()
    (w1, w2, loss), info = pccl.allreduce([*gradients, loss], op="avg", return_info=True)
    w1, w2 = state["w1"] - 0.2 * w1, state["w2"] - 0.2 * w2
    state = {"step": state["step"] + 1, "w1": w1, "w2": w2}
    if state["step"] % max(1, STEPS // 25) == 0:
        peers = f"[green]{'●' * info.world_size:4}[/] {info.world_size} peers"
        print(f"pid {os.getpid()}  step {state['step']:4}  loss {loss:.4f}  {peers}")

scores = np.maximum(images[1500:] @ state["w1"], 0) @ state["w2"]
right = (scores.argmax(axis=1) == labels[order[1500:]]).mean()
weights = hashlib.sha256(state["w1"].tobytes() + state["w2"].tobytes()).hexdigest()[:16]
print(f"pid {os.getpid()}  done, accuracy {right:.1%}, weights sha256 [bold green]{weights}")
