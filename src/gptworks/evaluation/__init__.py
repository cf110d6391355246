"""Evaluate a model: its predictions of held-out text, and its answers to the items of tasks."""
