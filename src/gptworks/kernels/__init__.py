"""Implementations of operations: C++ for CPUs and its library, faster torch code, and the table that lists them."""
