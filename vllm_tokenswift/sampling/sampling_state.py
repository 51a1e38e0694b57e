"""What the tree sampler knows about one request, derived from its committed history.

The fields mirror what vLLM's ``InputBatch.add_request`` makes of
``SamplingParams`` (vllm/v1/worker/gpu_input_batch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from vllm.sampling_params import SamplingParams, SamplingType

from vllm_tokenswift.sampling.penalty.window import TokenWindow
from vllm_tokenswift.sampling.position_noise import PositionDraws
from vllm_tokenswift.sampling.request_parameters import RequestOptions
from vllm_tokenswift.sampling.token_counts import TokenCounts

Value = TypeVar("Value", float, torch.Tensor)


class SamplingNumbers(NamedTuple, Generic[Value]):
    """The numeric parameters: one request's (floats), or all rows' (float32 ``[rows]``).

    float32 is what vLLM keeps them in; top_k stays exact below 2**24.
    """

    temperature: Value  # 1 for greedy requests
    min_p: Value
    eta_epsilon: Value  # 0: off
    eta_alpha: Value
    top_k: Value  # vocabulary size: off
    top_p: Value
    theta: Value
    repetition: Value
    frequency: Value
    presence: Value


class SamplingState:
    """One request's sampling parameters and the part of its history they look at.

    Only what the parameters ask for is kept: the newest W tokens for the windowed
    penalty, one count per vocabulary entry for vLLM's penalties, and as many output
    tokens as the longest bad word is long.

    Args:
        params: the request's, as vLLM has them.
        options: TokenSwift's own parameters of it.
        prompt: token ids.
        output: token ids emitted so far.
        draws: the noise of its coming positions.
        vocab_size: width of the logits.
        device: of the logits.
    """

    def __init__(
        self,
        params: SamplingParams,
        options: RequestOptions,
        prompt: Sequence[int],
        output: Sequence[int],
        draws: PositionDraws,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.draws = draws
        self.greedy = params.sampling_type == SamplingType.GREEDY
        top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
        self.uses_top_k = top_k < vocab_size
        self.uses_top_p = params.top_p < 1
        self.numbers = SamplingNumbers(
            temperature=1.0 if self.greedy else params.temperature,
            min_p=params.min_p,
            eta_epsilon=options.eta_epsilon or 0.0,
            eta_alpha=options.eta_alpha or 0.0,
            top_k=top_k,
            top_p=params.top_p,
            theta=options.penalty_theta,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        self.cuts_unlikely = (
            self.uses_top_k or self.uses_top_p or params.min_p > 0 or bool(options.eta_epsilon)
        )
        self.num_prompt = len(prompt)
        self.num_output = len(output)

        self.forbidden: torch.Tensor | None = None  # bool [vocab]
        if params.allowed_token_ids:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden[params.allowed_token_ids] = False

        self.bad_words: list[list[int]] = params.bad_words_token_ids or []
        self._tail_length = max(map(len, self.bad_words), default=1) - 1
        self.tail: list[int] = []  # the newest output tokens, for bad words
        self._extend_tail(output[-self._tail_length :] if self._tail_length else ())

        self.min_tokens = params.min_tokens
        self.stop_token_ids = sorted(params.all_stop_token_ids)
        self.structured = params.structured_outputs is not None

        self.bias = params.logit_bias or {}

        self.window: TokenWindow | None = None
        if options.penalty_theta != 1.0:
            self.window = TokenWindow.over(options.penalty_window, prompt, output)

        self.counts: TokenCounts | None = None
        if (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        ):
            self.counts = TokenCounts(vocab_size, prompt, output, device)

        # Whether logits may change token by token, by more than the windowed penalty.
        self.edits_tokens = (
            self.forbidden is not None
            or bool(self.bad_words)
            or bool(self.bias)
            or self.counts is not None
        )
        # Whether anything beside the shape of the distribution may change its logits.
        self.is_constrained = self.edits_tokens or self.min_tokens > 0 or self.window is not None

        # What to return: None: nothing; n: the n likeliest and the sampled token.
        self.num_logprobs = vocab_size if params.logprobs == -1 else params.logprobs
        self.logprob_token_ids = params.logprob_token_ids or []

    def commit_tokens(self, tokens: Sequence[int]) -> None:
        """The history grows by emitted tokens, whose draws are used up."""
        self.num_output += len(tokens)
        self._extend_tail(tokens)
        if self.window is not None:
            self.window.append_tokens(tokens)
        if self.counts is not None and tokens:
            self.counts.count_tokens(tokens)
        self.draws.drop_draws(len(tokens))

    def _extend_tail(self, tokens: Sequence[int]) -> None:
        if self._tail_length:
            self.tail = [*self.tail, *tokens][-self._tail_length :]
