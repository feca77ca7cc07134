"""Ray Train over pccl: python ray_train.py

When a worker is killed, Ray starts all workers again, and they load the latest checkpoint.
"""

import sys
import tempfile

try:
    import torch
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
except ImportError as e:  # without a name: ray is there, and its extra is not
    print(f"{e.name or 'ray.train'} is missing: pip install torch 'ray[train]'", file=sys.stderr)
    sys.exit(2)

backend, folder = [*sys.argv[1:], "pccl", tempfile.gettempdir()][:2]


def loop():
    torch.manual_seed(1)
    x, start, rank = torch.randn(512, 8), 0, train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as made:
            start, weights = torch.load(f"{made}/state.pt")
            model.load_state_dict(weights)
    for step in range(start, 40):
        batch = x[32 * ((2 * step + rank) % 16) :][:32]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            with tempfile.TemporaryDirectory() as made:
                torch.save((step + 1, model.state_dict()), f"{made}/state.pt")
                train.report({"loss": loss.item()}, train.Checkpoint.from_directory(made))


run = train.RunConfig(None, folder, failure_config=train.FailureConfig(max_failures=1))
size = train.ScalingConfig(num_workers=2)
trainer = TorchTrainer(loop, torch_config=TorchConfig(backend), scaling_config=size, run_config=run)
print("loss", trainer.fit().metrics["loss"])
