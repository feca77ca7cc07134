"""Training on top of reductions: DiLoCo, elastic data and checkpoints."""
