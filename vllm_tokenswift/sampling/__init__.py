"""From logits to accepted tokens: what plain vLLM would sample, at every tree node."""
