"""Quantization: matrices in 16, 8 or 4 bits per weight, all other tensors in fp32.

formats   the packed formats and their values
panels    the memory layout that the native kernels read
rounding  rounding of weights to representable values: to the nearest, or by GPTQ
linear    layers with a packed matrix, and the GPT that has such layers
convert   quantizes a model in memory
load      packs a checkpoint's weights while reading them
"""
