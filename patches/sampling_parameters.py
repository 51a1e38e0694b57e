"""Replacement in ``vllm/sampling_params.py``: parameters that vLLM refuses under speculation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_tokenswift.speculative_config import is_active

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.sampling_params import SamplingParams


def validate_spec_decode(original: Callable[..., None]) -> Callable[..., None]:
    """Checks a request's parameters as TokenSwift needs it, in place of vLLM's refusals.

    Args:
        original: ``SamplingParams._validate_spec_decode``.

    Returns:
        What takes its place.
    """

    @functools.wraps(original)
    def replacement(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> Any:
        if not is_active(speculative_config):
            return original(self, speculative_config)
        from vllm.exceptions import VLLMValidationError

        from vllm_tokenswift.sampling.request_parameters import validate

        try:
            validate(self)
        except ValueError as error:
            # The server answers 400 to this class, 500 to others.
            raise VLLMValidationError(str(error)) from error
        return None

    return replacement
