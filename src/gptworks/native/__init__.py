"""GPTs in C++ on CPUs: the kernels, the library that is built of them, and the backend."""
