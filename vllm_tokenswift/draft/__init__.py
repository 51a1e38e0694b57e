"""Drafting: what to propose for the next tokens, and how much of it is worth verifying.

Plain Python over token lists; nothing here knows vLLM. The way through it:
:class:`~vllm_tokenswift.draft.state.DraftState` (one per request) offers candidates,
:class:`~vllm_tokenswift.draft.planner.Planner` (one per engine) turns the offers of a
batch into draft trees.
"""
