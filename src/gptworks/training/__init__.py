"""Training: the loop, the step, and the records of a run."""
