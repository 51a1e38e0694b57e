"""Settings for the paper's models: ``{"method": "tokenswift", "preset": "llama3.1-8b"}``.

A preset has three parts, because they are used in three places:

* :data:`PRESETS`: options of TokenSwift (:mod:`vllm_tokenswift.options`) for the engine;
* :func:`sampling_recipe`: keyword arguments of vLLM's ``SamplingParams``, for a request
  (temperature and top-p or min-p are a request's in vLLM, never the engine's);
* :func:`training_recipe`: how the heads were trained.

SamplingNumbers of the five base models are from the paper's appendix "Additional Training and
Inference Details" (its tables of training and of inference details). Those of the two
32B models are from the authors' released inference and training scripts for
DeepSeek-R1-Distill-Qwen-32B; they released QwQ-32B with the same structure and no script,
so it takes the same numbers. The budget is the released scripts' 4,096 tokens (the paper
ties it to the length of the prompt, which they prefill with 4,096).

Not set here: ``num_speculative_tokens``. The paper verifies some 100 nodes, which costs
more than it gains on a GPU that reads the cache fast; the planner takes what pays of the default.
``heads``: the authors' checkpoints (:data:`RELEASED_CHECKPOINTS`) hold the target's
weights too, so name one as both ``model`` and ``heads``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

BUDGET_TOKENS = 4096
PENALTY_WINDOW = 1024
NGRAM_K = 20


@dataclass(frozen=True)
class _Row:
    """One model's row of the paper's tables; ``checkpoint`` is the authors' repository."""

    checkpoint: str
    penalty_theta: float
    top_p: float | None = None
    min_p: float | None = None
    learning_rate: float = 5e-3
    num_steps: int = 200
    batch_size: int = 3


_ROWS = {
    "yarn-llama2-7b-128k": _Row("TokenSwift/TokenSwift-Yarn-Llama-2-7b-128k", 1.15, top_p=0.9),
    "llama3.1-8b": _Row("TokenSwift/TokenSwift-Llama-3.1-8B", 1.2, min_p=0.1),
    "qwen2.5-1.5b": _Row("TokenSwift/TokenSwift-Qwen2.5-1.5B", 1.15, top_p=0.9),
    "qwen2.5-7b": _Row("TokenSwift/TokenSwift-Qwen2.5-7B", 1.15, min_p=0.05),
    "qwen2.5-14b": _Row(
        "TokenSwift/TokenSwift-Qwen2.5-14B",
        1.13,
        min_p=0.05,
        learning_rate=1e-3,
        num_steps=600,
        batch_size=1,
    ),
    "deepseek-r1-distill-qwen-32b": _Row(
        "TokenSwift/TokenSwift-DeepSeek-R1-Distill-Qwen-32B", 1.2, min_p=0.1
    ),
    "qwq-32b": _Row("TokenSwift/TokenSwift-QwQ-32B", 1.2, min_p=0.1),
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {
        "head_tree": (1, 3, 3, 3),
        "budget_tokens": BUDGET_TOKENS,
        "sink_tokens": 16,
        "ngram_k": NGRAM_K,
        "ngram_n": 4,
        "penalty_theta": row.penalty_theta,
        "penalty_window": PENALTY_WINDOW,
    }
    for name, row in _ROWS.items()
}
"""``{preset: {option: value}}``; options given beside a preset override it."""

RELEASED_CHECKPOINTS: dict[str, str] = {name: row.checkpoint for name, row in _ROWS.items()}
"""``{preset: hub repository}`` of the authors' checkpoint (target weights and heads)."""


def _row(preset: str) -> _Row:
    if preset not in _ROWS:
        nearest = difflib.get_close_matches(preset, _ROWS, n=1, cutoff=0)[0]
        raise ValueError(
            f"preset is {preset!r}; the nearest is {nearest!r}. "
            f"All presets: {', '.join(sorted(_ROWS))}"
        )
    return _ROWS[preset]


def sampling_recipe(preset: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``SamplingParams`` that the paper uses for a model.

    The windowed penalty travels in ``extra_args``, which wins over the engine's default:
    a recipe is whole without the preset's engine options.

    Args:
        preset: its name.

    Returns:
        Temperature, top-p or min-p, and the penalty.

    Raises:
        ValueError: for an unknown preset.
    """
    row = _row(preset)
    recipe: dict[str, Any] = {"temperature": 1.0}
    if row.top_p is not None:
        recipe["top_p"] = row.top_p
    if row.min_p is not None:
        recipe["min_p"] = row.min_p
    recipe["extra_args"] = {
        "penalty_theta": row.penalty_theta,
        "penalty_window": PENALTY_WINDOW,
    }
    return recipe


def training_recipe(preset: str) -> dict[str, Any]:
    """The numbers of ``train`` in which the paper's models differ.

    Args:
        preset: its name.

    Returns:
        ``learning_rate``, ``num_steps`` and ``batch_size`` (sequences on each GPU).

    Raises:
        ValueError: for an unknown preset.
    """
    row = _row(preset)
    return {
        "learning_rate": row.learning_rate,
        "num_steps": row.num_steps,
        "batch_size": row.batch_size,
    }
