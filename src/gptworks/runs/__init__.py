"""Runs: reports, comparisons, bands of expected losses, sweeps, tries, and quantized copies.

Figures come from `recipe.yaml` and `metrics.jsonl`, so a run that is still training or has crashed has them too.
"""
