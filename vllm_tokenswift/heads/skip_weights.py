"""Let vLLM load a merged checkpoint (target weights and heads in one folder) as a model.

vLLM's models load through ``AutoWeightsLoader`` (``vllm/model_executor/models/utils.py``),
which raises on any tensor that the model has no parameter for, so
``model.medusa_layers.*`` would stop the engine. The loader also applies one name mapper
to every model's weights, ``REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER``, in which a pattern
mapped to None drops a weight. This adds the heads' names there. No model of vLLM has
parameters of these names (its own Medusa drafter calls them ``medusa_heads``).

What upstream change would remove it: a documented list of weight names to ignore, in
``LoadConfig`` or on the model class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

HEAD_WEIGHTS = re.compile(r"^(?:model\.)?medusa_layers\.")


@contextmanager
def head_weights_skipped() -> Iterator[None]:
    """While a model is loaded inside, vLLM's weight loader passes over a checkpoint's heads.

    Put back afterwards: another engine of the process finds vLLM as it was.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    stock = AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
    AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER = stock | WeightsMapper(
        orig_to_new_regex={HEAD_WEIGHTS: None}
    )
    try:
        yield
    finally:
        AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER = stock
