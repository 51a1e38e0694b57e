"""Writes the tables of options into README.md and docs/options.md, from the dataclass that
defines the options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vllm_tokenswift.options import Option, TokenSwiftOptions

ROOT = Path(__file__).resolve().parent.parent
README, PAGE = ROOT / "README.md", ROOT / "docs" / "options.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->"
MOST_USED = (
    "heads",
    "preset",
    "penalty_theta",
    "penalty_window",
    "budget_tokens",
    "num_speculative_tokens",
    "plan",
    "record",
)
"""The options that README shows."""


def table() -> str:
    """All options, with what is allowed and where their defaults come from."""
    header = ["option", "default", "allowed", "what it does", "where the default comes from"]
    rows = [
        [
            f"`{name}`",
            f"`{default}`",
            f"{option.allowed} ({option.unit})",
            option.text,
            option.origin,
        ]
        for name, default, option in _options()
    ]
    return _markdown(header, rows)


def most_used() -> str:
    """Those of :data:`MOST_USED`, in that order, with what they do."""
    described = {
        name: [f"`{name}`", f"`{default}`", option.text] for name, default, option in _options()
    }
    return _markdown(["option", "default", "what it does"], [described[name] for name in MOST_USED])


def cell(text: str) -> str:
    """A text as a cell of a table: a bare ``|`` would end it, in code too."""
    return text.replace("|", "\\|")


def _options() -> list[tuple[str, str, Option]]:
    defaults = TokenSwiftOptions().to_dict()
    return [
        (field.name, json.dumps(defaults[field.name]), field.metadata["option"])
        for field in dataclasses.fields(TokenSwiftOptions)
    ]


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def _put(page: Path, made: str) -> None:
    text = page.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    page.write_text(text[:before] + made + text[after:])


if __name__ == "__main__":
    _put(README, most_used())
    _put(PAGE, table())
