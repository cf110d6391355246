"""Implementations of operations: C++ for CPUs, its compiled library, faster torch code, and the table of all."""
