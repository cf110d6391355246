"""Report and compare runs, test changes in sweeps and tries, and make quantized copies.

A run's losses, times and speeds come from its `recipe.yaml` and `metrics.jsonl`, so they also exist during training and
after a crash.
"""
