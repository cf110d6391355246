"""Quantization: matrices in 16, 8 or 4 bits a weight, the rest in fp32.

formats   the packed formats and their values
panels    the memory layout of the native kernels
rounding  rounding of weights to representable values: to the nearest, or by GPTQ
linear    the modules that hold packed matrices, and the GPT made of them
convert   a model → its quantized form
load      a checkpoint's weights → packed ones, while they are read
"""
