"""TokenSwift's options: one frozen dataclass, validated once, before vLLM starts.

They may stand in the speculative configuration beside ``"method": "tokenswift"`` or
in ``additional_config["tokenswift"]``, where the engine's processes read them.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_DRAFT_NODES = 128
"""A tree kernel keeps a node's ancestors as bit masks of this many nodes."""
MAX_HEAD_TREE_NODES = 1024
MAX_SELF_DRAFT_STEPS = 4
"""Self-draft passes of one step; KV slots are reserved for each."""


class UnknownOptionError(ValueError):
    """An option that TokenSwift does not have; the message names the nearest one."""


@dataclass(frozen=True)
class Option:
    """What one option means and allows.

    Attributes:
        text: what it does.
        unit: of its value.
        origin: where its default comes from.
        low: inclusive lower bound of a number, None where there is none.
        high: inclusive upper bound of a number, None where there is none.
        choices: the allowed words of a choice.
        optional: whether None is allowed.
    """

    text: str
    unit: str
    origin: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            words = "one of " + ", ".join(f'"{choice}"' for choice in self.choices)
        elif self.unit == "children":
            words = f"a list of 1 to 8 whole numbers, each {self.low:.9g} to {self.high:.9g}"
        elif self.low is None:
            words = "a text"
        else:
            kind = "a number" if self.unit == "factor" else "a whole number"
            upper = f" to {self.high:.9g}" if self.high is not None else " or more"
            words = f"{kind}, {self.low:.9g}{upper}"
        return words + (", or null" if self.optional else "")


def _option(default: Any, text: str, *, unit: str, origin: str, **bounds: Any) -> Any:
    option = Option(text=text, unit=unit, origin=origin, **bounds)
    return dataclasses.field(default=default, metadata={"option": option})


@dataclass(frozen=True)
class TokenSwiftOptions:
    """Every option of TokenSwift.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    num_speculative_tokens: int = _option(
        63,
        "Node budget: the most draft nodes of a tree that one verify pass checks.",
        unit="draft nodes",
        origin="an 8B model's verify pass of 64 rows costs little more than a decode step on "
        "Hopper, and the planner drafts fewer where that does not pay",
        low=1,
        high=MAX_DRAFT_NODES,
    )
    preset: str | None = _option(
        None,
        "Name of a model's settings; options given beside it override it.",
        unit="name",
        origin="no model is assumed",
        optional=True,
    )
    heads: str | None = _option(
        None,
        "Checkpoint of the self-drafting heads: a folder or file in any form.",
        unit="path",
        origin="works without heads",
        optional=True,
    )
    head_source: str = _option(
        "auto",
        'Hidden state the heads start from: the draft pass\'s ("draft"), the verify '
        'pass\'s own, at no extra pass ("free"), or whichever there is ("auto").',
        unit="choice",
        origin="the draft pass's state where there is one (the paper), else the free one",
        choices=("auto", "draft", "free"),
    )
    head_tree: tuple[int, ...] = _option(
        (1, 3, 3, 3),
        "Children per level of the head tree where plan is not auto: the first entry for the "
        "target's own next token, one more for each head.",
        unit="children",
        origin="the paper's [1, 3, 3, 3]",
        low=1,
        high=32,
    )
    self_draft: str = _option(
        "auto",
        "Draft passes over the partial KV cache: when they pay, in every iteration, or never. "
        f"Where plan is auto, up to {MAX_SELF_DRAFT_STEPS} are made in a row.",
        unit="choice",
        origin="further passes pay only where reading KV outweighs reading weights",
        choices=("auto", "always", "off"),
    )
    partial_kv: str = _option(
        "dynamic",
        "Draft block table: reselected as text is written, selected once after the prompt, "
        "or the whole sequence.",
        unit="choice",
        origin="the paper's dynamic KV updates",
        choices=("dynamic", "static", "full"),
    )
    budget_tokens: int = _option(
        2048,
        "The paper's |B|: cached tokens that the draft pass reads, the sinks among them.",
        unit="tokens",
        origin="from there on partial and full KV seldom disagree on the top token (design study)",
        low=32,
        high=1_000_000,
    )
    sink_tokens: int = _option(
        16,
        "The paper's |S|: first tokens of the sequence that the draft pass always reads.",
        unit="tokens",
        origin="the paper",
        low=0,
        high=4096,
    )
    refresh_tokens: int | None = _option(
        None,
        "New tokens after which the important blocks are selected again; null is the "
        "paper's rule, once all of them have been replaced by newer ones, or earlier where "
        "plan is auto and their age costs more drafts than selecting costs.",
        unit="tokens",
        origin="the paper",
        low=1,
        high=1_000_000,
        optional=True,
    )
    ngram_k: int = _option(
        20,
        "The paper's k: most frequent n-grams proposed as drafts; 0 switches the table off, and "
        "with it the statistics of what followed the newest tokens in sampled text.",
        unit="n-grams",
        origin="the paper",
        low=0,
        high=MAX_DRAFT_NODES,
    )
    ngram_n: int = _option(
        4,
        "Length of the n-grams in the table.",
        unit="tokens",
        origin="the paper",
        low=2,
        high=16,
    )
    suffix_max_match: int = _option(
        16,
        "Longest recent context looked up in the sequence so far, to copy what followed; "
        "0 switches it off.",
        unit="tokens",
        origin="longer matches are rare",
        low=0,
        high=64,
    )
    penalty_theta: float = _option(
        1.0,
        "Windowed penalty of requests that name none: logits of tokens in the window are "
        "divided (or, if negative, multiplied) by it; 1 switches it off.",
        unit="factor",
        origin="off; the paper uses a theta of 1.2 with base models",
        low=1,
        high=10,
    )
    penalty_window: int = _option(
        1024,
        "The paper's W: newest tokens that the windowed penalty looks at.",
        unit="tokens",
        origin="the paper; a window shorter than a loop cannot break it",
        low=1,
    )
    plan: str = _option(
        "auto",
        "Who decides what is drafted: the planner as it runs, the paper's constant setting, "
        "or this configuration as it stands.",
        unit="choice",
        origin="nobody has to tune it",
        choices=("auto", "paper", "fixed"),
    )
    record: str | None = _option(
        None,
        "Folder into which a record of every request that ends is written, for "
        "`vllm-tokenswift explain`.",
        unit="path",
        origin="nothing is recorded",
        optional=True,
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.metadata["option"])
        self._check_together()

    def _check_together(self) -> None:
        if self.sink_tokens >= self.budget_tokens:
            raise ValueError(
                f"sink_tokens is {self.sink_tokens}: it must be below budget_tokens "
                f"({self.budget_tokens}), which the sinks are part of"
            )
        if self.head_tree_nodes > MAX_HEAD_TREE_NODES:
            raise ValueError(
                f"head_tree is {list(self.head_tree)}, a tree of {self.head_tree_nodes} nodes: "
                f"allowed are {MAX_HEAD_TREE_NODES}"
            )
        if self.refresh_tokens is not None and self.partial_kv != "dynamic":
            raise ValueError(
                f"refresh_tokens is {self.refresh_tokens}, but partial_kv is "
                f'"{self.partial_kv}": only "dynamic" selects blocks again'
            )
        if self.heads is None and self.head_source != "auto":
            raise ValueError(
                f'head_source is "{self.head_source}", but there are no heads: give their '
                'checkpoint as "heads", or leave head_source out'
            )
        if self.self_draft == "off":
            if self.head_source == "draft":
                raise ValueError(
                    'head_source is "draft", but self_draft is "off": without a draft pass the '
                    'heads can only be "free"'
                )
            if self.plan == "paper":
                raise ValueError(
                    'plan is "paper", but self_draft is "off": the paper drafts with a pass in '
                    "every iteration"
                )
            if self.heads is None and self.ngram_k == 0 and self.suffix_max_match == 0:
                raise ValueError(
                    "no source of drafts is left: self_draft is off, there are no heads, and "
                    "ngram_k and suffix_max_match are 0; switch one of them on"
                )

    @property
    def head_tree_nodes(self) -> int:
        """Nodes of the head tree: every level multiplies the one above."""
        return sum(math.prod(self.head_tree[: i + 1]) for i in range(len(self.head_tree)))

    @property
    def lookahead_tokens(self) -> int:
        """KV slots needed beyond the scheduled tokens: those of a step that is not scheduled yet.

        Draft passes fill them with approximations that the verify pass overwrites, and a pass
        launched ahead of its schedule (``engine/prelaunch.py``) writes there.
        """
        return 1 + self.num_speculative_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, every option; ``from_dict`` reads it back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["head_tree"] = list(self.head_tree)
        return values

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> TokenSwiftOptions:
        """The options that are named, over their preset's, over the defaults.

        Args:
            given: options by name, lists in place of tuples.

        Returns:
            All options.

        Raises:
            UnknownOptionError: where a name is no option's.
            ValueError: where a value is not allowed.
        """
        names = option_names()
        for name in given:
            if name not in names:
                raise UnknownOptionError(unknown_option(name))
        values = dict(given)
        if values.get("preset") is not None:
            values = {**_preset(values["preset"]), **values}
        if isinstance(values.get("head_tree"), list):
            # JSON has no tuples.
            values["head_tree"] = tuple(values["head_tree"])
        return cls(**values)


def option_names() -> tuple[str, ...]:
    """The names of all options, in the order of their table."""
    return tuple(field.name for field in dataclasses.fields(TokenSwiftOptions))


def unknown_option(name: str) -> str:
    """The sentence for an option that does not exist.

    Args:
        name: what was given.

    Returns:
        The sentence, with the nearest option and what it allows.
    """
    nearest = difflib.get_close_matches(name, option_names(), n=1, cutoff=0)
    option: Option = TokenSwiftOptions.__dataclass_fields__[nearest[0]].metadata["option"]
    return (
        f'"{name}" is not an option of TokenSwift; the nearest is "{nearest[0]}" '
        f"({option.allowed}). All options: {', '.join(option_names())}"
    )


def _preset(name: object) -> Mapping[str, Any]:
    from vllm_tokenswift.presets import PRESETS

    if not isinstance(name, str) or name not in PRESETS:
        nearest = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0)
        raise ValueError(
            f"preset is {name!r}; the nearest is {nearest[0]!r}. "
            f"All presets: {', '.join(sorted(PRESETS))}"
        )
    preset: Mapping[str, Any] = PRESETS[name]
    return preset


def _check(name: str, value: Any, option: Option) -> None:
    if not _is_allowed(value, option):
        raise ValueError(f"{name} is {value!r}: allowed is {option.allowed} ({option.unit})")


def _is_allowed(value: Any, option: Option) -> bool:
    if value is None:
        return option.optional
    if option.choices:
        return value in option.choices
    if option.unit == "children":
        return (
            isinstance(value, tuple)
            and 1 <= len(value) <= 8
            and all(_is_whole(child) and _is_within(child, option) for child in value)
        )
    if option.low is None:
        return isinstance(value, str) and value != ""
    if option.unit == "factor":
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and _is_within(value, option)
    return _is_whole(value) and _is_within(value, option)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_within(value: float, option: Option) -> bool:
    at_least = option.low is None or value >= option.low
    return at_least and (option.high is None or value <= option.high)
