"""Evaluation: how well a model predicts held-out text."""

from gptworks.evaluate.loss import LossReport, compressor_bits_per_byte, evaluate_loss

__all__ = ["LossReport", "compressor_bits_per_byte", "evaluate_loss"]
