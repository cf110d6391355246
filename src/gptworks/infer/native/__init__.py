"""The engine's backend in C++: a GPT's step on a CPU, its weights as the kernels read them, and its cache."""
