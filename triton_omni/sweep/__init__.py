"""The ablation: one optimisation after the other is switched on, and each is measured at every concurrency."""
