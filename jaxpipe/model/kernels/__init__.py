"""Kernels of GPUs: cuDNN's fused attention, and grouped products of 8-bit floats."""
