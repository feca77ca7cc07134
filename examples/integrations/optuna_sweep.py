"""A sweep with Optuna, in which each trial is a run of its own: python optuna_sweep.py

A trial survives the loss of a member as any run does. pccl needs to know nothing of the sweep.
"""

import subprocess
import sys

try:
    import optuna
except ModuleNotFoundError as error:
    print(f"{error.name} is missing: pip install optuna", file=sys.stderr)
    sys.exit(2)

TRAIN = """
import sys, numpy as np, pccl
pccl.init()
state = {"w": np.zeros(4), "step": 0}
while True:
    if pccl.admit():
        state = pccl.sync(state)
    if state["step"] == 20:
        break
    x = np.random.default_rng([state["step"], pccl.rank()]).standard_normal((64, 4))
    gradient = 2 * x.T @ (x @ (state["w"] - 1)) / 64
    state["w"] -= float(sys.argv[1]) * pccl.allreduce(gradient, "avg")
    state["step"] += 1
if pccl.rank() == 0:
    print("loss", float(((state["w"] - 1) ** 2).mean()))
pccl.shutdown()
"""


def objective(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("rate", 1e-3, 0.4, log=True)
    run = [sys.executable, "-m", "pccl", "run", "-n", "2", "--elastic", "--"]
    command = [*run, sys.executable, "-c", TRAIN, str(rate)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
study.optimize(objective, n_trials=5)
print("best", study.best_params["rate"], "loss", study.best_value)
