"""Kernels and the attention backend for CUDA; every kernel has an eager twin beside it."""
