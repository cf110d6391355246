"""Optimizers, and the choice of the parameters that they train."""
