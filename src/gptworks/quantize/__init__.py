"""Quantization: matrices in 16, 8 or 4 bits per weight, all other tensors in fp32.

formats  the packed formats, and the rounding of weights: to the nearest value, or by GPTQ
panels   the memory layout that the native kernels read
linear   layers with a packed matrix, and the GPT that has such layers
convert  quantizes a model in memory, or while reading a checkpoint
"""
