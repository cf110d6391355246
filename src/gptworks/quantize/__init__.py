"""Quantization: matrices kept in 16, 8 or 4 bits a weight, the rest in fp32.

formats   how a matrix is packed, and what it unpacks to
panels    how the native kernels want it laid out
rounding  which of the representable values each weight becomes: the nearest, or GPTQ's
linear    the modules that hold packed matrices, and the GPT made of them
convert   a model → its quantized form
load      a checkpoint's weights → packed ones, as they are read
"""
