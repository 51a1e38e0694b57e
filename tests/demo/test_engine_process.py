"""One engine in a process of its own, asked several times."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tokenswift.demo.engine_process import EngineProcess
from vllm_tokenswift.demo.texts import Batch, TextRequest


def test_an_engine_is_kept_and_writes_what_it_is_asked_for(demo_model: Path) -> None:
    engine = {
        "model": str(demo_model),
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
    }
    length = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
    rain, sea = (TextRequest(word, f"What is {word}?", length) for word in ("rain", "the sea"))
    with EngineProcess(engine) as kept:
        kept.warm_up([rain])
        [first] = kept.write_texts([rain])
        [both] = kept.write([Batch("both", [sea, rain])])
    assert [text.name for text in both.texts] == ["the sea", "rain"]
    assert both.texts[1].tokens == first.tokens
    assert first.counts[-1] == len(first.tokens) == 6
    assert first.stats == {}  # nobody speculated


def test_an_engine_that_does_not_start_says_why() -> None:
    with (
        pytest.raises(RuntimeError, match="no-such-folder"),
        EngineProcess({"model": "/no-such-folder"}),
    ):
        raise AssertionError("it has started")
