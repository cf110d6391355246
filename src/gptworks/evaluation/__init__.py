"""Evaluation: how well a model predicts held-out text."""
