"""Sequential heads on CUDA, all in one graph."""
