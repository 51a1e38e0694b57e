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

HEAD_WEIGHTS = re.compile(r"^(?:model\.)?medusa_layers\.")


def skip_head_weights() -> None:
    """Make vLLM's weight loader of this process pass over the heads of a checkpoint.

    Call in the worker before the model is loaded, and only when TokenSwift is asked for.
    Calling it again changes nothing.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

    mapper = AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
    if HEAD_WEIGHTS not in mapper.orig_to_new_regex:
        AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER = mapper | WeightsMapper(
            orig_to_new_regex={HEAD_WEIGHTS: None}
        )
