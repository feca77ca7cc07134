"""Lightning members of a DiLoCo run: pccl run -n 2 --elastic -- python lightning_diloco.py

When a member is killed, the others go on.
"""

import sys

try:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch lightning", file=sys.stderr)
    sys.exit(2)

from pccl.adapters.lightning import DiLoCoCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.02)


torch.seed()  # other examples in each process
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
trainer = Trainer(
    max_steps=100, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
    callbacks=[DiLoCoCallback(sync_every=10)],
)  # fmt: skip
model = Model()
trainer.fit(model, DataLoader(TensorDataset(x, y), 32, shuffle=True))
loss = torch.nn.functional.mse_loss(model.layer(x), y).item()
print("loss", loss, "weights", model.layer.weight.double().sum().item())
