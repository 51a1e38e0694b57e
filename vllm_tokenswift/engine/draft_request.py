"""The requests that a step drafts for, as those see them who draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


@dataclass(frozen=True)
class HeadRequest:
    """What heads need to know.

    Attributes:
        req_id: the request.
        bonus_token: the newest of the sequence, not yet in the KV cache.
        noise: the noise of the coming samples, None where there is none to see.
    """

    req_id: str
    bonus_token: int
    noise: GumbelNoise | None


@dataclass(frozen=True)
class DraftRequest(HeadRequest):
    """What all sources of drafts and the planner need to know.

    Attributes:
        state: what is kept of it between steps.
        num_tokens: tokens of the sequence, the bonus token included.
        blocks: int32 ``[blocks]``, physical blocks in logical order.
        hidden_row: the query row that the bonus token was sampled from.
        max_nodes: drafts that still fit the model's length and are wanted.
    """

    state: RequestState
    num_tokens: int
    blocks: npt.NDArray[np.int32]
    hidden_row: int
    max_nodes: int


@dataclass(frozen=True)
class Drafts:
    """What a step drafted for one request.

    Attributes:
        tree: empty where plain decoding is better.
        heads: what heads or a draft pass proposed for it, None where nothing was asked.
    """

    tree: DraftTree
    heads: HeadProposals | None


NO_DRAFTS = Drafts(EMPTY_TREE, None)
