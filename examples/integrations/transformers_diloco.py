"""Trainers in a DiLoCo run: pccl run -n 2 --elastic -- python transformers_diloco.py

When a member is killed, the others go on.
"""

import sys
import tempfile

try:
    import accelerate  # noqa: F401, which the Trainer needs
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch transformers accelerate", file=sys.stderr)
    sys.exit(2)

from pccl.adapters.transformers import DiLoCoCallback

torch.seed()  # other examples in each process
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2))
starts = torch.randint(32, (128,))
data = [{"input_ids": row, "labels": row} for row in (starts[:, None] + torch.arange(8)) % 32]
args = TrainingArguments(
    tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=8, max_steps=60, save_strategy="no",
    seed=torch.initial_seed() % 2**32, learning_rate=1e-2, report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, args, train_dataset=data, callbacks=[DiLoCoCallback(sync_every=10)])
trainer.train()
weights = sum(p.double().sum().item() for p in model.parameters())
print("loss", trainer.evaluate(data)["eval_loss"], "weights", weights)
