"""A training step before training: refused, counted without memory, or measured."""
