"""Lightning's DDP over pccl: torchrun --nproc-per-node 2 --max-restarts 1 lightning_ddp.py

When a rank is killed, torchrun starts all ranks again, and they load the latest checkpoint.
"""

import os
import sys

try:
    import torch
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch lightning", file=sys.stderr)
    sys.exit(2)

backend, folder = [*sys.argv[1:], "pccl", "lightning_ddp"][:2]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


seed_everything(1)
x = torch.randn(512, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 32, shuffle=True)
trainer = Trainer(
    max_epochs=4, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), logger=False,
    strategy=DDPStrategy(process_group_backend=backend),
    callbacks=[ModelCheckpoint(folder, save_last=True)],
)  # fmt: skip
model = Model()
trainer.fit(model, loader, ckpt_path="last")
print("loss", torch.nn.functional.mse_loss(model.layer(x), x.sum(1, keepdim=True)).item())
