"""CUDA graphs of verify and draft passes."""
