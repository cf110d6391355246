"""Rehearsals of a run's training step: check that it fits in memory, trace its memory, or measure it."""
