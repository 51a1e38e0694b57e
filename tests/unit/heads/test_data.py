from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_tokenswift.heads.data import (
    IGNORED,
    Sequence,
    count_labels,
    make_batch,
    order,
    read_sequences,
    split_held_out,
)

TEXTS = ["the first text, long enough to be cut " * 3, "the second " * 5]


@pytest.fixture
def tokenizer(target_folder: Callable[..., Path]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target_folder())


def _read(path: Path, tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[Sequence]:
    defaults = {"seq_tokens": 50, "num_heads": 3, "vocab_size": 96, "limit": 1000}
    return read_sequences(path, tokenizer, **(defaults | options))


def _sequence(tokens: int, first: int = 0, document: int = 0) -> Sequence:
    return Sequence(np.arange(10, 10 + tokens, dtype=np.int32), first, document)


def _write_text(path: Path) -> Path:
    path.mkdir()
    for number, text in enumerate(TEXTS):
        (path / f"{number}.txt").write_text(text)
    return path


def _write_lines(path: Path) -> Path:
    path = path.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": text, "other": 1}) + "\n\n" for text in TEXTS))
    return path


def _write_parquet(path: Path) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": TEXTS}), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def _write_datasets_folder(path: Path) -> Path:
    """What ``datasets.DatasetDict.save_to_disk`` writes: an Arrow stream for each split."""
    pa = pytest.importorskip("pyarrow")
    for split, texts in (("train", TEXTS), ("test", ["not for training " * 9])):
        (path / split).mkdir(parents=True)
        table = pa.table({"text": texts})
        with pa.ipc.new_stream(path / split / "data-00000-of-00001.arrow", table.schema) as file:
            file.write_table(table)
        (path / split / "state.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    "write", [_write_text, _write_lines, _write_parquet, _write_datasets_folder]
)
def test_every_form_of_data_gives_the_same_sequences(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, write: Callable[[Path], Path]
) -> None:
    sequences = _read(write(tmp_path / "data"), tokenizer)
    assert [(len(s.token_ids), s.document) for s in sequences] == [
        (50, 0),
        (50, 0),
        (14, 0),
        (50, 1),
        (5, 1),
    ]
    text = "".join(tokenizer.convert_ids_to_tokens(sequences[0].token_ids.tolist()))
    assert text == TEXTS[0][:50]


def test_text_with_a_prompt_is_learned_from_the_prompts_last_token_on(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"token_ids": list(range(2, 62)), "num_prompt_tokens": 10}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    sequences = _read(tmp_path / "data.jsonl", tokenizer)
    assert [(len(s.token_ids), s.first) for s in sequences] == [(50, 9), (10, 0)]


def test_reading_stops_when_there_is_enough(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    (tmp_path / "data.jsonl").write_text((json.dumps({"text": TEXTS[0]}) + "\n") * 3 + "not JSON")
    assert len(_read(tmp_path / "data.jsonl", tokenizer, limit=9)) == 9


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "", r"a\.txt are empty"),
        ("a.jsonl", "\n\n", r"a\.jsonl are empty"),
        ("a.jsonl", '{"text": ""}', r"a\.jsonl are empty"),
        ("a.txt", "short", r"hold 5 tokens, less than one sequence of 50"),
        ("a.jsonl", '{"text": "x"}\n{"text', r"line 2 of .*a\.jsonl is not JSON"),
        ("a.jsonl", "[1, 2]", r"line 1 of .*a\.jsonl is not a JSON object"),
        ("a.jsonl", '{"body": "x"}', r"row without text: .*; this one has 'body'"),
        ("a.jsonl", '{"token_ids": [5, 96]}', r"holds token 96; the target's vocabulary has 96"),
        ("b/a.csv", "x", r"the folder .*b holds no \.txt"),
    ],
)
def test_bad_data_are_refused_each_with_its_own_sentence(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    content: str,
    sentence: str,
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        _read(tmp_path / name.split("/")[0], tokenizer)


def test_data_that_do_not_exist_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(ValueError, match="nowhere do not exist"):
        _read(tmp_path / "nowhere", tokenizer)


def test_a_truncated_parquet_file_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    file = _write_parquet(tmp_path / "data")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"data\.parquet cannot be read as parquet"):
        _read(file, tokenizer)


def test_head_i_is_asked_for_the_token_two_plus_i_ahead() -> None:
    batch = make_batch([_sequence(7), _sequence(5, first=1)], num_heads=3)
    assert batch.token_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16], [10, 11, 12, 13, 14, 0, 0]]
    flat = batch.token_ids.ravel()
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 8, 9]
    for head in range(3):
        for position, label in zip(batch.positions, batch.labels[head], strict=True):
            if label != IGNORED:
                assert label == flat[position] + 2 + head
    assert (batch.labels != IGNORED).sum(axis=1).tolist() == [7, 5, 3]
    assert count_labels([_sequence(7), _sequence(5, first=1)], 3) == [7, 5, 3]


def test_every_epoch_visits_every_sequence_once_and_a_resumed_one_goes_on() -> None:
    whole = order(10, seed=3, first=0, count=40)
    assert all(set(whole[i : i + 10]) == set(range(10)) for i in range(0, 40, 10))
    assert len({tuple(whole[i : i + 10]) for i in range(0, 40, 10)}) > 1
    parts = [order(10, seed=3, first=i, count=7) for i in range(0, 35, 7)]
    assert list(itertools.chain(*parts)) == whole[:35]


def test_whole_texts_are_held_out() -> None:
    sequences = [_sequence(9, document=d) for d in range(10) for _ in range(4)]
    learned, held_out = split_held_out(sequences, 0.2, seed=0)
    assert len(held_out) == 8
    assert set(Counter(s.document for s in held_out).values()) == {4}
    assert not {s.document for s in learned} & {s.document for s in held_out}


def test_of_a_single_text_its_end_is_held_out() -> None:
    sequences = [_sequence(9) for _ in range(10)]
    learned, held_out = split_held_out(sequences, 0.1, seed=0)
    assert (len(learned), held_out) == (9, sequences[-1:])


def test_a_single_sequence_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="the data make one sequence"):
        split_held_out([_sequence(9)], 0.05, seed=0)
