"""Estimates of a run's parameters, memory, FLOPs and time from its configuration; no model is built."""
