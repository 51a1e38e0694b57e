from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from benchmarks.figures import ROOT
from vllm_tokenswift.options import (
    MAX_HEAD_TREE_NODES,
    Option,
    TokenSwiftOptions,
    UnknownOptionError,
    option_names,
)
from vllm_tokenswift.presets import PRESETS

FIELDS = {f.name: f for f in dataclasses.fields(TokenSwiftOptions)}


def option(name: str) -> Option:
    found: Option = FIELDS[name].metadata["option"]
    return found


BOUNDED = [n for n in FIELDS if option(n).low is not None and option(n).unit != "children"]
CHOICES = [n for n in FIELDS if option(n).choices]


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_says_what_it_does_its_unit_and_where_its_default_comes_from(
    name: str,
) -> None:
    assert option(name).text.endswith(".")
    assert option(name).unit
    assert option(name).origin


@pytest.mark.parametrize("name", BOUNDED)
def test_values_just_outside_the_bounds_are_refused_naming_the_option(name: str) -> None:
    bounds = option(name)
    assert bounds.low is not None
    outside = [bounds.low - 1] + ([bounds.high + 1] if bounds.high is not None else [])
    for value in outside:
        with pytest.raises(ValueError, match=rf"^{name} is {value:.9g}") as refusal:
            TokenSwiftOptions.from_dict({name: int(value)})
        assert f"{bounds.low:.9g}" in str(refusal.value)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("value", [True, "7", [7], float("nan")])
def test_values_of_another_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} is "):
        TokenSwiftOptions.from_dict({name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is 'no'") as refusal:
        TokenSwiftOptions.from_dict({name: "no"})
    for choice in option(name).choices:
        assert choice in str(refusal.value)


@pytest.mark.parametrize("tree", [[], [0], [33], [1, 2.0], 3, "1333", [1] * 9, [True]])
def test_a_head_tree_that_is_no_list_of_widths_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="^head_tree is "):
        TokenSwiftOptions.from_dict({"head_tree": tree})


def test_a_head_tree_beyond_memory_is_refused_with_its_size() -> None:
    with pytest.raises(ValueError, match=str(MAX_HEAD_TREE_NODES)):
        TokenSwiftOptions.from_dict({"head_tree": [32, 32, 32]})


@pytest.mark.parametrize(
    ("misspelled", "nearest"),
    [
        ("ngram", "ngram_n"),
        ("num_spec_tokens", "num_speculative_tokens"),
        ("budget", "budget_tokens"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest_name_and_its_bounds(
    misspelled: str, nearest: str
) -> None:
    with pytest.raises(UnknownOptionError) as refusal:
        TokenSwiftOptions.from_dict({misspelled: 1})
    assert f'"{misspelled}"' in str(refusal.value)
    assert f'"{nearest}" ({option(nearest).allowed})' in str(refusal.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sink_tokens": 64, "budget_tokens": 64}, "sink_tokens"),
        ({"refresh_tokens": 32, "partial_kv": "static"}, "refresh_tokens"),
        ({"head_source": "free"}, "head_source"),
        ({"head_source": "draft", "heads": "h", "self_draft": "off"}, "head_source"),
        ({"plan": "paper", "self_draft": "off"}, "plan"),
        ({"self_draft": "off", "ngram_k": 0, "suffix_max_match": 0}, "no source of drafts"),
    ],
)
def test_options_that_contradict_each_other_are_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TokenSwiftOptions.from_dict(given)


def test_options_survive_json() -> None:
    options = TokenSwiftOptions.from_dict({"head_tree": [2, 4], "penalty_theta": 1.1, "heads": "h"})
    again = TokenSwiftOptions.from_dict(json.loads(json.dumps(options.to_dict())))
    assert again == options
    assert again.head_tree == (2, 4)


def test_options_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TokenSwiftOptions().ngram_k = 3  # type: ignore[misc]


def test_an_option_beside_a_preset_overrides_it() -> None:
    preset = PRESETS["llama3.1-8b"]
    options = TokenSwiftOptions.from_dict({"preset": "llama3.1-8b", "budget_tokens": 512})
    assert options.penalty_theta == preset["penalty_theta"]
    assert options.budget_tokens == 512 != preset["budget_tokens"]
    assert TokenSwiftOptions.from_dict(options.to_dict()) == options


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"preset is 'llama3\.1'.*'llama3\.1-8b'"):
        TokenSwiftOptions.from_dict({"preset": "llama3.1"})


def test_the_paper_s_numbers_are_the_defaults() -> None:
    options = TokenSwiftOptions()
    assert (options.ngram_k, options.ngram_n) == (20, 4)
    assert options.head_tree == (1, 3, 3, 3)
    assert options.head_tree_nodes == 1 + 3 + 9 + 27
    assert options.sink_tokens == 16
    assert options.penalty_window == 1024


def scripted() -> dict[str, Any]:
    """The names of the script that writes the tables of options."""
    from runpy import run_path

    return run_path(str(ROOT / "scripts" / "readme_options.py"))


def test_the_tables_of_options_are_the_dataclass() -> None:
    made = scripted()
    table: str = made["table"]()
    assert table in made["PAGE"].read_text(), "run `make readme`"
    assert all(f"`{name}`" in table for name in option_names())
    assert made["most_used"]() in made["README"].read_text(), "run `make readme`"
    assert set(made["MOST_USED"]) <= set(option_names())


@pytest.mark.parametrize("table", ["table", "most_used"])
def test_every_row_of_a_table_of_options_has_the_cells_of_its_header(table: str) -> None:
    lines: list[str] = scripted()[table]().splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    assert cells == [cells[0]] * len(lines)
    assert any(r"\|B\|" in line for line in lines)
