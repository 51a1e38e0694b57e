"""How important a KV block is to the newest token: its share of the attention.

The paper ranks tokens per KV head by q.k, summed over the query heads of the
head's group (equation "importance score" for GQA: queries are partitioned, keys
not replicated). A block's score here is the *attention mass* of its tokens: the
softmax over all cached tokens, summed over the block's tokens and over all query
heads (docs/design-notes.md says why).
"""

from __future__ import annotations

import torch


def block_masses(
    query: torch.Tensor, keys: torch.Tensor, num_tokens: int, scale: float
) -> torch.Tensor:
    """The attention mass of every block, for one request and layer.

    Paper, equation "importance score" for grouped-query attention, by softmax in place of q.k.

    Args:
        query: ``[heads, head_dim]``, any float dtype, the newest token's query.
        keys: ``[blocks, kv_heads, block_size, head_dim]``, any float dtype, in logical order.
        num_tokens: tokens in the cache; the rest of the last block is ignored.
        scale: the softmax scale.

    Returns:
        float32 ``[blocks]``; sums to the number of query heads.
    """
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    grouped = query.view(num_kv_heads, -1, head_dim).float()  # [kv_heads, group, head_dim]
    by_head = keys.permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    scores = grouped @ by_head.float().transpose(1, 2) * scale  # [kv_heads, group, tokens]
    scores[..., num_tokens:] = float("-inf")
    mass = scores.softmax(dim=-1).sum(dim=(0, 1))  # [tokens]
    return mass.view(num_blocks, block_size).sum(dim=1)
