"""Writes the options table into README.md, from the dataclass that defines the options."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from vllm_tokenswift.options import Option, TokenSwiftOptions

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->"


def table() -> str:
    rows = ["| option | default | allowed | what it does; where the default comes from |"]
    rows.append("| --- | --- | --- | --- |")
    defaults = TokenSwiftOptions().to_dict()
    for field in dataclasses.fields(TokenSwiftOptions):
        option: Option = field.metadata["option"]
        rows.append(
            f"| `{field.name}` | `{json.dumps(defaults[field.name])}` | {option.allowed} "
            f"({option.unit}) | {option.text} Default: {option.origin}. |"
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = README.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    README.write_text(text[:before] + table() + text[after:])
