"""Replacement in ``vllm/config/vllm.py``: KV slots for the draft pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.speculative_config import CONFIG_KEY, is_active

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def num_lookahead_tokens(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Reserves the KV slots that draft passes and prelaunched passes write.

    Args:
        original: the getter of ``VllmConfig.num_lookahead_tokens``.

    Returns:
        What takes its place.
    """

    @functools.wraps(original)
    def replacement(self: VllmConfig) -> int:
        if not is_active(self.speculative_config):
            return original(self)
        additional: Any = self.additional_config
        return TokenSwiftOptions.from_dict(additional[CONFIG_KEY]).lookahead_tokens

    return replacement
