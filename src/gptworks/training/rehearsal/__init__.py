"""Rehearsals of a run's training step: plans its memory and time, traces its memory, or measures both."""
