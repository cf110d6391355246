"""C++ kernels for CPUs, the library that is built of them, and the functions that call it."""
