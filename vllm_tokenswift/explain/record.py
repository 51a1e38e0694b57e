"""The record of a finished generation: a JSON file that holds all that ``explain`` reads.

Iterations are stored by columns, one list for each field of :class:`Iteration`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import BySource, Source

FORMAT = 3

NO_NODES: BySource = (0,) * len(Source)
PROMPT = "prompt"
"""The decision of the iteration that read the prompt's end: there was nothing to decide."""
HEAD_SOURCES = (Source.SELF, Source.HEADS, Source.FREE_HEADS)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One verify pass, or plain step, of a request.

    Attributes:
        position: tokens of the sequence before it, the bonus token included.
        emitted: tokens that it added.
        drafted: nodes by source.
        accepted: nodes by source.
        side_chains: attention chains of the tree besides its main one.
        passes: self-draft passes made for it.
        free_heads: passes of free heads made for it.
        num_requests: requests that were decoded in the same step.
        decisions: the planner's words (``Planner.decisions``), "prompt", or "none" where
            nothing was planned.
    """

    position: int
    emitted: int
    drafted: BySource = NO_NODES
    accepted: BySource = NO_NODES
    side_chains: int = 0
    passes: int = 0
    free_heads: int = 0
    num_requests: int = 1
    decisions: tuple[str, ...] = ()

    @property
    def num_drafted(self) -> int:
        """Nodes that were verified."""
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        """Nodes that were accepted."""
        return sum(self.accepted)

    @property
    def is_decode(self) -> bool:
        """Whether it decoded, and did not read the prompt's end."""
        return PROMPT not in self.decisions


@dataclass
class Record:
    """A finished generation.

    Attributes:
        request_id: the engine's.
        prompt_len: tokens of the prompt.
        token_ids: prompt and output; the last iteration's tokens may reach past the place
            where the request was stopped.
        cost: what passes cost on the machine that it ran on.
        options: what the engine ran with.
        iterations: in order, each at the position where the one before it ended.
        sampled: whether its tokens were drawn (temperature above 0).

    Raises:
        ValueError: where the parts do not fit together.
    """

    request_id: str
    prompt_len: int
    token_ids: list[int]
    cost: CostModel
    options: TokenSwiftOptions
    iterations: list[Iteration] = field(default_factory=list)
    sampled: bool = False

    def __post_init__(self) -> None:
        position = self.prompt_len
        for index, iteration in enumerate(self.iterations):
            if iteration.position != position:
                raise ValueError(
                    f"iteration {index} stands at position {iteration.position}, and "
                    f"{position} tokens come before it"
                )
            position += iteration.emitted
        if position != len(self.token_ids):
            raise ValueError(
                f"prompt and iterations come to {position} tokens, and token_ids holds "
                f"{len(self.token_ids)}"
            )

    def draft_state(self) -> DraftState:
        """A state of the request before any token, with the indexes that it ran with."""
        options = self.options
        return DraftState(options.ngram_n, options.ngram_k, options.suffix_max_match, self.sampled)

    def to_json(self) -> str:
        """The record as JSON, iterations by columns; :meth:`from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "request_id": self.request_id,
                "prompt_len": self.prompt_len,
                "sampled": self.sampled,
                "token_ids": self.token_ids,
                "cost": json.loads(self.cost.to_json()),
                "plan": self.options.plan,
                "node_limit": self.options.num_speculative_tokens,
                "budget_tokens": self.options.budget_tokens,
                "options": self.options.to_dict(),
                "sources": [source.name.lower() for source in Source],
                "iterations": {
                    column.name: [getattr(row, column.name) for row in self.iterations]
                    for column in fields(Iteration)
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Reads what :meth:`to_json` wrote.

        Args:
            text: a file's contents.

        Returns:
            The record.

        Raises:
            ValueError: where the text is not a record of this version's.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON ({error})") from error
        if not isinstance(raw, dict) or "format" not in raw:
            raise ValueError('it is not a record: it has no "format"')
        expected = [source.name.lower() for source in Source]
        if raw["format"] != FORMAT or raw.get("sources") != expected:
            raise ValueError(
                f"it is a record of format {raw['format']!r} with sources {raw.get('sources')}; "
                f"this version reads format {FORMAT} with {expected}"
            )
        try:
            return cls(
                request_id=str(raw["request_id"]),
                prompt_len=int(raw["prompt_len"]),
                token_ids=[int(token) for token in raw["token_ids"]],
                cost=CostModel.from_json(json.dumps(raw["cost"])),
                options=TokenSwiftOptions.from_dict(raw["options"]),
                iterations=_rows(raw["iterations"]),
                sampled=bool(raw["sampled"]),
            )
        except KeyError as error:
            raise ValueError(f"{error} is missing") from error
        except TypeError as error:
            raise ValueError(f"a value is of another kind than expected ({error})") from error


def _rows(columns: dict[str, list[Any]]) -> list[Iteration]:
    names = [column.name for column in fields(Iteration)]
    rows: list[Iteration] = []
    for values in zip(*(columns[name] for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        for name in ("drafted", "accepted", "decisions"):
            row[name] = tuple(row[name])
        rows.append(Iteration(**row))
    return rows


def read_record(path: Path) -> Record:
    """Reads a record's file.

    Args:
        path: of the JSON file.

    Returns:
        The record.

    Raises:
        ValueError: with one sentence that names the file, where it holds no record.
    """
    try:
        return Record.from_json(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is no record that can be explained: {error}") from error
