"""Drafting: what to propose for the next tokens, and how much of it is worth verifying.

Over token lists; nothing here knows vLLM. The way through it:
:class:`~vllm_tokenswift.draft.draft_state.DraftState` (one per request) lets every source propose
and keeps the likeliest nodes, :class:`~vllm_tokenswift.draft.planner.planner.Planner` (one per
engine) decides for a batch how many become draft trees. What runs for every token is compiled
(:mod:`~vllm_tokenswift.common.compiled`).
"""
