"""Training: the loop, the optimizer step, and the records of a run."""
