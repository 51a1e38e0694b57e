"""TokenSwift on vLLM's CPU backend."""
