"""DiLoCo whose reductions run behind the training: `pccl run -n 4 -- python
examples/async_diloco.py`.

As torch_diloco.py, with a mode: what a round has taught is reduced while the next one is trained,
and applied in its middle, so that hardly anybody waits for the network. --mode streaming sends the
parameters in fragments instead, one after the other.
"""

import argparse
import sys
import zlib

try:
    import torch
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install 'pccl-collectives[torch,demo]'", file=sys.stderr)
    sys.exit(2)

import pccl
from pccl.adapters.torch import DiLoCo

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=30)
parser.add_argument("--mode", choices=["async", "streaming"], default="async")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(images))  # the same everywhere
x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
x, y, held_out = x[:1500], y[:1500], (x[1500:], y[1500:])

pccl.init()
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
inner = torch.optim.AdamW(model.parameters(), 1e-3)
diloco = DiLoCo(model, inner, sync_every=20, mode=args.mode)

while diloco.outer_step < args.rounds:
    # Other digits for each member, and for each step of the run.
    seed = torch.Generator().manual_seed(diloco.inner_step * 1000 + pccl.rank())
    batch = torch.randint(len(x), (32,), generator=seed)
    loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
    loss.backward()
    inner.step()
    inner.zero_grad()
    if diloco.step(tokens=len(batch)) and pccl.rank() == 0:
        print(f"round {diloco.outer_step}: loss {loss.item():.3f}", flush=True)

diloco.finish()  # what is still in flight; from here on all have the same model
with torch.no_grad():
    correct = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(
    f"rank {pccl.rank()}: accuracy {correct:.3f}, weights {zlib.crc32(weights):08x}, "
    f"{diloco.hidden:.0%} of the communication hidden"
)
