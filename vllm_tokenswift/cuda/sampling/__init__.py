"""Sampling at every tree node on CUDA."""
