"""Kernels of the model's operations: C++ and torch code for CPUs, Triton code for GPUs. `dispatch` chooses a kernel."""
