"""Looking at runs: a report of one, several compared, bands to hold a run against, and sweeps.

Everything is read from `recipe.yaml` and `metrics.jsonl`, so a run that is going on or has crashed can be seen too.
"""
