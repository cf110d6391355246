"""Kernels of the model's operations: a C++ library for CPUs, torch code, and the table that lists and chooses them."""
