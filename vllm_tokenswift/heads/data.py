"""Training text: read in several forms, cut into sequences, split and ordered.

Order is a function of the seed and the step, never of what ran before: a resumed
training sees the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
IGNORED = -100
"""Label of a position that nobody is asked about."""

_ID_COLUMNS = ("token_ids", "input_ids")


@dataclass(frozen=True)
class Sequence:
    """One training sequence.

    token_ids: int32 ``[tokens]``. first: the first position whose continuation is to be
    learned (the last token of the prompt, where the text has a prompt; else 0).
    document: number of the text it was cut from.
    """

    token_ids: Ids
    first: int
    document: int


@dataclass(frozen=True)
class Batch:
    """token_ids: int64 ``[batch, tokens]``, padded on the right with 0.
    positions: int64 ``[rows]``, into the flattened batch: where heads are asked.
    labels: int64 ``[num_heads, rows]``: head ``i``'s token at position ``t`` is the one
    at ``t + 2 + i``, or IGNORED where the sequence ends before.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    def tokens_before(self) -> npt.NDArray[np.int64]:
        """int64 ``[num_heads, rows]``: the token before the one that a head is asked for.

        Arbitrary where the label is IGNORED.
        """
        first = self.token_ids.reshape(-1)[self.positions + 1]
        return np.concatenate([first[None], np.maximum(self.labels[:-1], 0)])


def frequent_tokens(sequences: list[Sequence], count: int, vocab_size: int) -> torch.Tensor | None:
    """int64 ``[count]``: the most frequent tokens of what is learned, the likeliest first.

    None where that is the whole vocabulary: a ``count`` of 0, or none to leave out.
    """
    if not 0 < count < vocab_size:
        return None
    numbers = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        numbers += np.bincount(sequence.token_ids[sequence.first :], minlength=vocab_size)
    most = np.argsort(-numbers, kind="stable")[:count]
    return torch.from_numpy(most)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"the data {path} do not exist")
    if path.is_file():
        return [path]
    kinds = (".txt", ".jsonl", ".parquet", ".arrow")
    if not (files := sorted(p for p in path.rglob("*") if p.suffix in kinds)):
        raise ValueError(f"the folder {path} holds no {', no '.join(kinds)} file")
    # A saved `datasets.DatasetDict` has a folder for each split.
    return [file for file in files if file.is_relative_to(path / "train")] or files


def _rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """The texts of one file, each as ``{"text": ...}`` or ``{"token_ids": ...}``."""
    if file.suffix in (".json", ".jsonl"):
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"line {number} of {file} is not JSON ({error}); write one JSON "
                        "object on each line"
                    ) from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} of {file} is not a JSON object")
                yield row
    elif file.suffix in (".parquet", ".arrow"):
        yield from _arrow_rows(file)
    else:
        try:
            yield {"text": file.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error


def _arrow_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    """Parquet, or a shard of a saved ``datasets`` folder (an Arrow stream)."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ValueError(f"reading {file} needs the package pyarrow: install it") from error
    try:
        if file.suffix == ".parquet":
            batches = parquet.ParquetFile(file).iter_batches(batch_size=64)
        else:
            batches = arrow.ipc.open_stream(file)
        for batch in batches:
            yield from batch.to_pylist()
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{file} cannot be read as {file.suffix[1:]}: {error}") from error


def _tokens(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, file: Path) -> list[int]:
    for column in _ID_COLUMNS:
        if row.get(column) is not None:
            ids: list[int] = list(row[column])
            return ids
    text = row.get("text")
    if not isinstance(text, str):
        raise ValueError(
            f'{file} has a row without text: a row needs "text" or one of '
            f"{', '.join(_ID_COLUMNS)}; this one has {', '.join(map(repr, row)) or 'nothing'}"
        )
    # Without its warning about texts longer than the model's context: they are cut.
    encoded: list[int] = tokenizer(text, verbose=False)["input_ids"] if text else []
    return encoded


def read_sequences(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_tokens: int,
    num_heads: int,
    vocab_size: int,
    limit: int,
) -> list[Sequence]:
    """Cut the texts at ``path`` into sequences of up to ``seq_tokens`` tokens.

    path: a text file (one text), JSON lines or Parquet with a column ``text`` (or
        ``token_ids`` / ``input_ids``, with ``num_prompt_tokens`` where the text has a
        prompt), a folder of such files, or a folder saved by ``datasets``.
    limit: stop reading once there are this many sequences.

    A text's rest that is too short for all heads is left out. Raises ValueError where
    there is nothing to read, where all of it is shorter than one sequence, or where token
    ids are not the target's.
    """
    sequences: list[Sequence] = []
    total = document = 0
    for file in _files(path):
        for row in _rows(file):
            ids = np.asarray(_tokens(row, tokenizer, file), dtype=np.int64)
            if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(
                    f"{file} holds token {ids.max()}; the target's vocabulary has {vocab_size}: "
                    "the data were tokenized for another model"
                )
            total += len(ids)
            asked_from = max(0, int(row.get("num_prompt_tokens") or 0) - 1)
            for start in range(0, len(ids), seq_tokens):
                piece = ids[start : start + seq_tokens].astype(np.int32)
                first = max(0, asked_from - start)
                if len(piece) >= first + num_heads + 2:
                    sequences.append(Sequence(piece, first, document))
            document += 1
            if len(sequences) >= limit:
                return sequences
    if total == 0:
        raise ValueError(f"the data {path} are empty: they hold no text")
    if total < seq_tokens or not sequences:
        raise ValueError(
            f"the data {path} hold {total} tokens, less than one sequence of {seq_tokens}; "
            "give more text or shorter sequences (--seq-tokens)"
        )
    return sequences


def split_held_out(
    sequences: list[Sequence], share: float, seed: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Training and held-out sequences; whole texts are held out where there are several.

    Raises ValueError where both cannot have at least one sequence.
    """
    if share == 0:
        return sequences, []
    if len(sequences) < 2:
        raise ValueError(
            "the data make one sequence, and held-out accuracy needs a second; give more "
            "text, shorter sequences (--seq-tokens), or --held-out 0"
        )
    wanted = max(1, round(share * len(sequences)))
    groups = sorted({sequence.document for sequence in sequences})
    if len(groups) == 1:
        return sequences[:-wanted], sequences[-wanted:]
    sizes = dict.fromkeys(groups, 0)
    for sequence in sequences:
        sizes[sequence.document] += 1
    kept_out: set[int] = set()
    count = 0
    for index in np.random.default_rng(seed).permutation(len(groups))[:-1]:
        if count >= wanted:
            break
        kept_out.add(groups[index])
        count += sizes[groups[index]]
    learned = [s for s in sequences if s.document not in kept_out]
    return learned, [s for s in sequences if s.document in kept_out]


def order(num_sequences: int, seed: int, first: int, count: int) -> list[int]:
    """Sequence numbers ``first .. first + count`` of the endless shuffled stream: every
    sequence once for each epoch, in an order of that epoch's own."""
    numbers: list[int] = []
    for epoch in range(first // num_sequences, (first + count - 1) // num_sequences + 1):
        numbers.extend(np.random.default_rng([seed, epoch]).permutation(num_sequences).tolist())
    skipped = first % num_sequences
    return numbers[skipped : skipped + count]


def make_batch(sequences: list[Sequence], num_heads: int) -> Batch:
    """Pad sequences to the longest and lay out what each head is asked where."""
    width = max(len(sequence.token_ids) for sequence in sequences)
    token_ids = np.zeros((len(sequences), width), np.int64)
    positions, labels = [], []
    for row, sequence in enumerate(sequences):
        ids = sequence.token_ids.astype(np.int64)
        token_ids[row, : len(ids)] = ids
        at = np.arange(sequence.first, len(ids) - 2)  # head 0 has a label here
        padded = np.concatenate([ids, np.full(num_heads, IGNORED)])
        positions.append(row * width + at)
        labels.append(np.stack([padded[at + 2 + head] for head in range(num_heads)]))
    return Batch(token_ids, np.concatenate(positions), np.concatenate(labels, axis=1))


def count_labels(sequences: list[Sequence], num_heads: int) -> list[int]:
    """Labels of each head in these sequences, without making the batch."""
    return [
        sum(max(0, len(s.token_ids) - 2 - head - s.first) for s in sequences)
        for head in range(num_heads)
    ]
