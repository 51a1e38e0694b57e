"""What vLLM's ``custom_class`` method instantiates: the owner of the draft heads.

vLLM's hook ``propose(...)`` gets neither hidden states nor request ids, so the
runner drafts through ``engine/drafter.py`` instead and never calls it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from vllm_tokenswift.heads.checkpoint import load_heads
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.options import TokenSwiftOptions


class TokenSwiftProposer:
    heads: DraftHeads | None = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.options = TokenSwiftOptions.from_dict(vllm_config.additional_config["tokenswift"])

    def load_model(self, target: torch.nn.Module) -> None:
        if self.options.heads is None:
            return
        model_config = self.vllm_config.model_config
        self.heads = load_heads(
            self.options.heads,
            hidden_size=model_config.get_hidden_size(),
            dtype=model_config.dtype,
            device=next(target.parameters()).device,
            target_config=model_config.hf_text_config,
        )

    def propose(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(
            "TokenSwift drafts through its own runner; this engine runs vLLM's. "
            "Was parallel_config.worker_cls changed?"
        )
