"""The Trainer's DDP over pccl: torchrun --nproc-per-node 2 --max-restarts 1 transformers_ddp.py

When a rank is killed, torchrun starts all ranks again, and they load the latest checkpoint.
"""

import os
import sys

try:
    import accelerate  # noqa: F401, which the Trainer needs
    import torch
    import torch.distributed as dist
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install torch transformers accelerate", file=sys.stderr)
    sys.exit(2)

backend, folder = [*sys.argv[1:], "pccl", "transformers_ddp"][:2]

dist.init_process_group(backend)  # before TrainingArguments, which take no other backend on CPUs
set_seed(1)
os.makedirs(folder, exist_ok=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2))
starts = torch.arange(128) % 32
data = [{"input_ids": row, "labels": row} for row in (starts[:, None] + torch.arange(8)) % 32]
args = TrainingArguments(
    folder, use_cpu=True, per_device_train_batch_size=8, max_steps=40, learning_rate=1e-2,
    save_steps=10, logging_steps=10, report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(model, args, train_dataset=data)
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
print("loss", trainer.evaluate(data)["eval_loss"])
