"""Updates of the weights: optimizers, their schedule and their guards."""
