"""What training programs need beside reductions: DiLoCo, elastic data and checkpoints."""
