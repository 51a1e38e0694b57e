"""What TokenSwift keeps for one request between steps."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.partial_kv.table import DraftBlockTable


@dataclass
class RequestState:
    """All of it follows from the request's committed tokens, so preemption loses nothing.

    Attributes:
        draft: n-gram table, suffix index and learned acceptance.
        table: the draft block table (``forget`` after preemption).
        speculate: False where the request switched speculation off.
        chain_only: vLLM checks the drafts of structured output as one continuation.
        max_tokens: of the whole sequence, at which it ends at the latest.
    """

    draft: DraftState
    table: DraftBlockTable
    speculate: bool
    chain_only: bool
    max_tokens: int

    @property
    def wants_top_k(self) -> bool:
        """Whether drafting makes use of what the target finds likeliest."""
        return self.speculate and self.draft.contexts is not None
