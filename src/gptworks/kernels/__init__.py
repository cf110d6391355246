"""What computes an operation: C++ for CPUs, the library that is built of it, torch's faster ways, and one table."""
