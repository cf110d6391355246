"""Implementations of the model's operations: a C++ library for CPUs, faster torch code, and the table of both."""
