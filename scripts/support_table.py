"""Writes what TokenSwift refuses into docs/compatibility.md, from the tables that refuse it."""

from __future__ import annotations

from pathlib import Path

from vllm_tokenswift.support import REFUSED, REFUSED_ARGUMENTS, REFUSED_MODELS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "compatibility.md"
BEGIN, END = "<!-- refused: begin -->\n", "<!-- refused: end -->"


def table() -> str:
    """The refused features as a Markdown table, a row each."""
    rows = [
        "| refused | asked for by | supported in its place |",
        "| --- | --- | --- |",
        *(
            f"| {kind.feature} | the model | decoder-only models with full attention |"
            for kind in REFUSED_MODELS
        ),
        *(
            f"| {refusal.feature} | {refusal.asked_by} | {refusal.instead} |"
            for refusal in (*REFUSED_ARGUMENTS, *REFUSED)
        ),
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:before] + table() + text[after:])
