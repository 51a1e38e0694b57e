"""Tree attention on CUDA: the backend, its kernels, and the KV cache they read."""
