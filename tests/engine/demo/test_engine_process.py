"""Engines in processes of their own, and the demo's table and picture of what they wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tokenswift.demo import model as embedded
from vllm_tokenswift.demo.engine_process import EngineProcess
from vllm_tokenswift.demo.measures import Comparison, table
from vllm_tokenswift.demo.plot import time_against_tokens
from vllm_tokenswift.demo.texts import Batch, TextRequest


def test_plain_and_tokenswift_are_asked_and_compared(demo_model: Path, tmp_path: Path) -> None:
    engine = {
        "model": str(demo_model),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
    }
    tokenswift = {"method": "tokenswift", "heads": embedded.HEADS}
    length = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    rain, sea = (TextRequest(word, f"What is {word}?", length) for word in ("rain", "the sea"))
    with EngineProcess(engine) as kept:
        kept.warm_up([rain])
        [plain] = kept.write_texts([rain])
        [both] = kept.write([Batch("both", [sea, rain])])
        with pytest.raises(RuntimeError, match="'no_such_method' is not implemented"):
            kept.call("no_such_method", 1)
    assert [text.name for text in both.texts] == ["the sea", "rain"]
    assert both.texts[1].tokens == plain.tokens
    assert plain.counts[-1] == len(plain.tokens) == 40
    assert plain.stats == {}  # nobody speculated

    with EngineProcess({**engine, "speculative_config": tokenswift}) as kept:
        [ours] = kept.write_texts([rain])
    comparison = Comparison(plain, ours, gamma_plus_1=4)
    said = table(comparison)
    assert said.splitlines()[-1].split() == ["tokens", "identical", "yes"]
    assert comparison.tokens_per_iteration > 1.0
    assert comparison.alpha > 0.0
    picture = tmp_path / "times.png"
    time_against_tokens([comparison], "a test", picture)
    assert picture.stat().st_size > 1000


def test_an_engine_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match="no-such-folder"),
        EngineProcess({"model": "/no-such-folder"}),
    ):
        raise AssertionError("it has started")
