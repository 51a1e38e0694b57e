"""The modes that the planner's benchmark compares, and one engine that changes between them.

An engine starts in half a minute, and every mode of every repeat would need one; a machine's
drift between two of them would count. So there are two, kept and taking turns: plain vLLM, and
TokenSwift, which changes its mode while no request is running. Where it is asked for, a third is
vLLM with its own n-gram speculation, which cannot write all that the others write
(:func:`batch_for`).

A mode of TokenSwift is everything that its options decide: the options themselves, which every
request reads when it comes, the node limit, the heads, and the :class:`Drafter` that is made
of them. Each mode has a Drafter made as an engine that starts with these options makes it,
measured costs included. Not quite as in an engine of its own are

* vLLM's scheduler, which counts on the largest node limit. It pads a request's first step with
  that many drafts where all but one token of its prompt is in the prefix cache;
* CUDA graphs, which are captured up to the largest node limit: with fewer nodes other widths
  would be. The limit of the fixed modes on a GPU, 31 by default, fills one that there is;
* hidden states for heads that read them before the final norm: the passes of modes without
  heads return them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import long_generation
from vllm_tokenswift.demo.engine_process import EngineProcess
from vllm_tokenswift.demo.texts import WINDOWED_PENALTY, Batch
from vllm_tokenswift.options import TokenSwiftOptions

if TYPE_CHECKING:
    from vllm_tokenswift.engine.drafter import Drafter
    from vllm_tokenswift.heads.model import DraftHeads

PLAIN, AUTO, NGRAM = "plain", "auto", "ngram"

_ONE_PASS = {"plan": "fixed", "self_draft": "off"}
_NO_TABLE = {"ngram_k": 0}
_NO_SUFFIX = {"suffix_max_match": 0}
_NO_HEADS = {"heads": None}
FIXED_MODES: dict[str, dict[str, Any]] = {
    "fixed": {"plan": "fixed"},
    "table": {**_ONE_PASS, **_NO_HEADS, **_NO_SUFFIX},
    "suffix": {**_ONE_PASS, **_NO_HEADS, **_NO_TABLE},
    "heads": {**_ONE_PASS, **_NO_TABLE, **_NO_SUFFIX},
    "self-draft": {"plan": "fixed", "self_draft": "always", **_NO_TABLE, **_NO_SUFFIX},
    "paper": {"plan": "paper"},
}
"""What the options of each are, where they are not those of "auto"."""
# A draft pass reads less than a plain step only once the text is longer than its budget.
_LONG_MODES = ("self-draft", "paper")


def modes_for(num_tokens: int, heads: str | None) -> list[str]:
    """The modes, ``NGRAM`` aside, that mean something for texts of this length."""
    long = num_tokens > TokenSwiftOptions().budget_tokens
    fixed = [
        mode
        for mode in FIXED_MODES
        if (long or mode not in _LONG_MODES) and (heads or mode != "heads")
    ]
    return [PLAIN, AUTO, *fixed]


def options_of(mode: str, nodes: int) -> dict[str, Any]:
    """The options of a fixed mode that drafts up to ``nodes`` nodes, as in ``FIXED_MODES``."""
    return {"num_speculative_tokens": nodes, **FIXED_MODES[mode]}


def plain_engine() -> dict[str, Any]:
    """Arguments of ``LLM`` that make it vLLM's own, with what the penalised texts need."""
    return {"logits_processors": [WINDOWED_PENALTY]}


def tokenswift_engine(heads: str | None) -> dict[str, Any]:
    """Arguments of ``LLM`` that make it plan for itself, and able to change its mode."""
    return {
        "speculative_config": {"method": "tokenswift", "heads": heads},
        "worker_extension_cls": f"{__name__}.{ModesOfAWorker.__name__}",
    }


def ngram_engine() -> dict[str, Any]:
    """Arguments of ``LLM`` that make it vLLM's with its own n-gram speculation."""
    return {"speculative_config": long_generation.NGRAM}


def engines_for(modes: Sequence[str], heads: str | None) -> dict[str, dict[str, Any]]:
    """The engines that are kept for these modes: arguments of ``LLM``, by a mode of each.

    ``AUTO`` is TokenSwift's, whichever of its modes are asked for.
    """
    own = {PLAIN: plain_engine(), AUTO: tokenswift_engine(heads)}
    return {**own, NGRAM: ngram_engine()} if NGRAM in modes else own


def ngram_sampling(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's n-gram speculation samples with where the others sample with ``sampling``.

    It refuses min-p and logits processors. What comes nearest is top-p, and vLLM's own penalty,
    which looks back over prompt and text, without a window. Both are vLLM's built-in code; on a
    CPU its top-p sorts the vocabulary, which min-p does not.
    """
    nearest = {
        name: value for name, value in sampling.items() if name not in ("min_p", "extra_args")
    }
    if "min_p" in sampling:
        nearest["top_p"] = long_generation.NGRAM_TOP_P
    if "extra_args" in sampling:
        nearest["repetition_penalty"] = sampling["extra_args"]["penalty_theta"]
    return nearest


def batch_for(mode: str, batch: Batch) -> Batch:
    """The batch as a mode can write it: see :func:`ngram_sampling`."""
    if mode != NGRAM:
        return batch
    texts = [
        dataclasses.replace(text, sampling=ngram_sampling(text.sampling)) for text in batch.texts
    ]
    return dataclasses.replace(batch, texts=texts)


@contextmanager
def engines(
    engine: Mapping[str, Any], heads: str | None, modes: Sequence[str], nodes: int
) -> Iterator[Callable[[str], EngineProcess]]:
    """Kept engines; yields what makes one of them write in a mode.

    engine: arguments of ``LLM`` that all get. modes: those that will be asked for. nodes: see
    :func:`options_of`. Raises ValueError where they are more than TokenSwift's engine has
    room for.
    """
    most = TokenSwiftOptions().num_speculative_tokens
    if nodes > most:
        raise ValueError(f"fixed modes of {nodes} nodes: the engine drafts up to {most}")
    fixed = {mode: options_of(mode, nodes) for mode in modes if mode in FIXED_MODES}
    with ExitStack() as stack:
        kept = {
            mode: stack.enter_context(EngineProcess({**engine, **own}))
            for mode, own in engines_for(modes, heads).items()
        }
        kept[AUTO].call("make_modes", fixed)

        def in_mode(mode: str) -> EngineProcess:
            if mode in (PLAIN, NGRAM):
                return kept[mode]
            kept[AUTO].call("change_mode", mode)
            return kept[AUTO]

        yield in_mode


@dataclass(frozen=True)
class _Mode:
    """What a runner has in a mode, and in no other."""

    options: TokenSwiftOptions
    heads: DraftHeads | None
    drafter: Drafter


class ModesOfAWorker:
    """Methods for TokenSwift's workers (vLLM's ``worker_extension_cls``).

    Each is called on all ranks, between batches.
    """

    model_runner: Any

    def make_modes(self, fixed: Mapping[str, Mapping[str, Any]]) -> None:
        """Makes modes beside the one that the engine started in, which is ``AUTO``.

        fixed: by their names, the options in which they differ from it. To be called before
        the engine writes: costs not yet known are measured over its empty cache.

        Raises ValueError where options are not allowed.
        """
        runner = self.model_runner
        own = _Mode(runner.options, runner.drafter.heads, runner.tree_drafter)
        self._modes = {AUTO: own}
        for name, different in fixed.items():
            options = dataclasses.replace(own.options, **different)
            heads = own.heads if options.heads is not None else None
            self._set_up(options, heads)
            self._modes[name] = _Mode(options, heads, runner.make_drafter())
        self.change_mode(AUTO)

    def change_mode(self, name: str) -> None:
        """From now on the engine is in this mode. To be called while no request is running."""
        mode = self._modes[name]
        self._set_up(mode.options, mode.heads)
        self.model_runner.draft_with(mode.drafter)

    def _set_up(self, options: TokenSwiftOptions, heads: DraftHeads | None) -> None:
        runner = self.model_runner
        runner.options = options
        runner.num_spec_tokens = options.num_speculative_tokens
        runner.drafter.heads = heads
