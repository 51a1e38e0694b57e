"""The frozen target while heads learn: its hidden states and its LM head, in ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_tokenswift.heads.files import TensorFolder
from vllm_tokenswift.heads.model import Reads
from vllm_tokenswift.heads.target import TargetShape


def target_shape(model: str) -> TargetShape:
    """The shape of a target from its configuration alone.

    Raises ValueError where there is no such model, or its kind is not supported.
    """
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no configuration of a model can be read from {model!r}") from error
    return TargetShape.from_config(config)


class FrozenTarget:
    """A target that only reads: no gradients, no cache.

    Raises ValueError where a file of a local model is missing or cut short.

    lm_head: ``[vocab, hidden]`` in the target's dtype, tied to the embeddings or not.
    embeddings: ``[vocab, hidden]``, of the input tokens.
    final_norm: ``[hidden]``, the weight of the norm before the LM head.
    """

    def __init__(self, model: str, dtype: str, device: torch.device) -> None:
        if Path(model).is_dir():
            TensorFolder(Path(model))
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model = loaded.to(device).eval().requires_grad_(False)
        self.lm_head: Tensor = self.model.get_output_embeddings().weight
        self.embeddings: Tensor = self.model.get_input_embeddings().weight
        self.final_norm: Tensor = self.model.model.norm.weight

    @torch.no_grad()
    def hidden(self, token_ids: Tensor, reads: Reads) -> Tensor:
        """The last hidden state, before or after the final norm.

        token_ids: int64 ``[batch, tokens]``, padded on the right (which causal attention
            never looks at). Returns ``[batch, tokens, hidden]`` in the target's dtype.
        """
        before: list[Tensor] = []

        def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            before.append(inputs[0])

        hook = self.model.model.norm.register_forward_pre_hook(keep)
        try:
            output = self.model.model(input_ids=token_ids, use_cache=False)
        finally:
            hook.remove()
        after: Tensor = output.last_hidden_state
        return after if reads == "post_norm" else before[0]
