"""The windowed penalty on plain vLLM's model runner V1, by batch row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates

from vllm_tokenswift.sampling.penalty.window import TokenWindow, penalise, window_indices
from vllm_tokenswift.sampling.request_parameters import PenaltyDefaults, RequestOptions

_PLACEHOLDER = -1
"""Async scheduling appends it to the output until the sampled token has arrived."""


class LiveWindow:
    """The window over a prompt and an output list that vLLM goes on writing to.

    vLLM appends tokens, may write placeholders and replace them later, and may take
    tokens back (after a failed KV load). What counts is the list when the window is
    read; placeholders that still stand at its end belong to rows whose sample is
    thrown away.

    Args:
        options: the request's theta and W.
        prompt: its token ids.
        output: vLLM's own list, kept and read again.
    """

    def __init__(self, options: RequestOptions, prompt: Sequence[int], output: list[int]) -> None:
        self.theta = options.penalty_theta
        self._size = options.penalty_window
        self._prompt = prompt
        self._output = output
        self._seen = 0  # output tokens that the window has taken in
        self.window = TokenWindow.over(self._size, prompt, ())
        self.read_output()

    def read_output(self) -> TokenWindow:
        """The window at the output's present end."""
        known = self._num_known()
        if known < self._seen:
            newest = self._output[max(known - self._size, 0) : known]
            self.window = TokenWindow.over(self._size, self._prompt, newest)
        else:
            unread = max(self._seen, known - self._size)
            self.window.append_tokens(self._output[unread:known])
        self._seen = known
        return self.window

    def _num_known(self) -> int:
        known = len(self._output)
        while known and self._output[known - 1] == _PLACEHOLDER:
            known -= 1
        return known


class BatchWindows:
    """Live windows of the requests that are penalised, by their row in the batch.

    Args:
        defaults: theta and W of requests that name none.
    """

    def __init__(self, defaults: PenaltyDefaults) -> None:
        self._defaults = defaults
        self._windows: dict[int, LiveWindow] = {}

    def update_batch(self, batch_update: BatchUpdate | None) -> None:
        """Follows vLLM's batch: requests come, go and change places.

        Args:
            batch_update: what changed; None where only outputs grew.
        """
        process_dict_updates(self._windows, batch_update, self._new_window)
        # Tokens taken back must be noticed before others stand in their place.
        for window in self._windows.values():
            window.read_output()

    def penalise(self, logits: torch.Tensor) -> None:
        """Penalises every row whose request asks for it.

        Args:
            logits: float32 ``[batch rows, vocab]``, changed in place.
        """
        windows = {row: window.read_output() for row, window in self._windows.items()}
        # A prompt of embeddings has no token ids: nothing to penalise at first.
        rows = [row for row, window in windows.items() if len(window.tokens)]
        if not rows:
            return
        tokens = window_indices(
            [windows[row] for row in rows], list(range(len(rows))), [()] * len(rows), logits.device
        )
        theta = torch.tensor([[self._windows[row].theta] for row in rows], dtype=torch.float32)
        index = torch.tensor(rows, device=logits.device).unsqueeze(1)
        penalise(logits, index, tokens, theta.to(logits.device))

    def _new_window(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> LiveWindow | None:
        options = RequestOptions.from_sampling_params(params, self._defaults)
        if options.penalty_theta == 1.0:
            return None
        return LiveWindow(options, prompt or [], output)
