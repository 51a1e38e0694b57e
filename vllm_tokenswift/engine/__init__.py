"""The seam: the only part of the project that knows vLLM's worker and runner."""
