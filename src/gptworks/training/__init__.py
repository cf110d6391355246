"""Training: the loop, the step, and what is recorded."""
