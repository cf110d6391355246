"""Conversations and pairs of answers: read, masked, packed and inspected."""
