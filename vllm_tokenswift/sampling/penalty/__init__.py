"""The windowed penalty (the paper's contextual penalty): trees, and both of vLLM's runners."""
