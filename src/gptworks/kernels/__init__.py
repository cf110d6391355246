"""Kernels of the model's operations: a C++ library for CPUs, torch code, and a table from which to choose one."""
