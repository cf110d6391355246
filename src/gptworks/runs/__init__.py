"""Report and compare runs, test changes in sweeps and tries, and make quantized copies.

All figures come from a run's `recipe.yaml` and `metrics.jsonl`, so they also exist during training and after a crash.
"""
