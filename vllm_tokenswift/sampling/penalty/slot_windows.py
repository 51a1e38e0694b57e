"""The windowed penalty on vLLM's model runner V2, by request slot.

V2 keeps every request's tokens on the device (``all_token_ids``, one row per
*request slot*), so the window is read from there; nothing is kept per request but
theta and W. A *logits row* is not a request: under speculation a request owns one
row for its newest token and one for each draft, and its drafts stand only in
``input_ids``.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

from vllm_tokenswift.sampling.penalty.window import penalise
from vllm_tokenswift.sampling.request_parameters import PenaltyDefaults, RequestOptions


class SlotWindows:
    """theta and W of every request slot; the windows themselves lie in vLLM's buffers.

    Args:
        defaults: theta and W of requests that name none.
        states: vLLM's request states, which hold the tokens.
    """

    def __init__(self, defaults: PenaltyDefaults, states: LogitsProcRequestState) -> None:
        self._defaults = defaults
        self._states = states
        self._theta_host = np.ones(states.max_num_reqs, np.float32)
        self._size_host = np.ones(states.max_num_reqs, np.int64)
        self._theta = torch.ones(states.max_num_reqs, device=states.device)
        self._size = torch.ones(states.max_num_reqs, dtype=torch.int64, device=states.device)
        self._staged = False

    def add_request(self, slot: int, sampling_params: SamplingParams) -> bool:
        """Takes in the request of a slot; :meth:`apply_staged_writes` makes it count.

        Returns:
            Whether the request's logits will be changed.

        Raises:
            ValueError: a parameter of the request is not allowed.
        """
        options = RequestOptions.from_sampling_params(sampling_params, self._defaults)
        self._theta_host[slot] = options.penalty_theta
        self._size_host[slot] = options.penalty_window
        self._staged = True
        return options.penalty_theta != 1.0

    def apply_staged_writes(self) -> None:
        """Copies what was taken in to the device."""
        if self._staged:
            self._theta.copy_(torch.from_numpy(self._theta_host))
            self._size.copy_(torch.from_numpy(self._size_host))
            self._staged = False

    def penalise(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Penalises every row whose request asks for it.

        Args:
            logits: float32 ``[logits rows, vocab]``, changed in place.
            ctx: which row is whose, as vLLM lays the step out.
        """
        slots = ctx.idx_mapping_np[self._theta_host[ctx.idx_mapping_np] != 1.0]
        if not len(slots):
            return
        longest = int(ctx.seq_lens_upper_bound_np.max())
        width = min(int(self._size_host[slots].max()), longest)
        device = logits.device
        row = torch.arange(len(logits), device=device).unsqueeze(1)  # [rows, 1]
        slot = ctx.expanded_idx_mapping.long().unsqueeze(1)  # [rows, 1]
        newest = ctx.pos.long().unsqueeze(1)  # [rows, 1], sequence position
        # The request's newest committed token was fed at its first row.
        committed = newest - ctx.expanded_local_pos.long().unsqueeze(1)  # [rows, 1]
        back = torch.arange(width - 1, -1, -1, device=device)  # [width]
        position = newest - back  # [rows, width]
        drafts = ctx.input_ids[(row - back).clamp(min=0)]  # [rows, width]
        text = self._states.all_token_ids.gpu[slot, position.clamp(min=0)]  # [rows, width]
        tokens = torch.where(position >= committed, drafts, text)
        inside = (position >= 0) & (back < self._size[slot])
        # Rows of requests without a penalty have theta 1, which changes nothing.
        tokens = torch.where(inside, tokens, ctx.input_ids.unsqueeze(1)).long()
        penalise(logits, row, tokens, self._theta[slot])
