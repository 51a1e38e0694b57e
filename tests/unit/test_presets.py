from __future__ import annotations

import pytest
from vllm import SamplingParams

from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.presets import (
    PRESETS,
    RELEASED_CHECKPOINTS,
    sampling_recipe,
    training_recipe,
)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_made_of_options_that_are_allowed(preset: str) -> None:
    options = TokenSwiftOptions.from_dict({"preset": preset})
    assert (options.ngram_k, options.ngram_n, options.head_tree) == (20, 4, (1, 3, 3, 3))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_sampling_recipe_is_accepted_by_vllm_and_says_the_presets_penalty(preset: str) -> None:
    recipe = sampling_recipe(preset)
    params = SamplingParams(**recipe)
    assert params.temperature == 1.0
    assert (params.top_p < 1) != (params.min_p > 0)
    assert params.extra_args is not None
    for name in ("penalty_theta", "penalty_window"):
        assert params.extra_args[name] == PRESETS[preset][name]


def test_the_papers_numbers_of_two_models() -> None:
    assert sampling_recipe("llama3.1-8b") == {
        "temperature": 1.0,
        "min_p": 0.1,
        "extra_args": {"penalty_theta": 1.2, "penalty_window": 1024},
    }
    assert training_recipe("qwen2.5-14b") == {
        "learning_rate": 1e-3,
        "num_steps": 600,
        "batch_size": 1,
    }


def test_an_option_beside_a_preset_wins() -> None:
    options = TokenSwiftOptions.from_dict({"preset": "llama3.1-8b", "ngram_k": 5})
    assert (options.ngram_k, options.penalty_theta) == (5, 1.2)


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"the nearest is 'llama3\.1-8b'"):
        sampling_recipe("llama-3.1-8b")


def test_every_preset_names_the_authors_checkpoint() -> None:
    assert RELEASED_CHECKPOINTS.keys() == PRESETS.keys()
