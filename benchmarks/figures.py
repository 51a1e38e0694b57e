"""Figures in README.md and docs/ are links to the records that they come from.

A figure is written as a link whose title says where in the record it stands:

    [1.65](benchmarks/results/long_generation_8b.json "rows/tokens=20000/speedup")

    python -m benchmarks.figures           # what does not agree with its record
    python -m benchmarks.figures --write   # puts the records' values into the pages

A place is a path through the JSON, its steps parted by ``/``:

* a key of an object, as it stands;
* an entry of a list: its index, or ``key=value`` (several joined with ``&``) of the one object
  in it that has these values;
* ``*``: all entries of a list, or, as in ``*key=value``, all that have these values;
* at the end, over a list of numbers: ``min``, ``median``, ``max``, ``sum`` or ``count``.

``A over B`` is the quotient of two places. A figure shows its value rounded to the decimals that
it is written with.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tokenswift.versions import SUPPORTED_VLLM

ROOT = Path(__file__).resolve().parent.parent

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_FIGURE = re.compile(rf'\[(?P<shown>{_NUMBER})\]\((?P<record>[^)\s]+\.json)\s+"(?P<place>[^"]+)"\)')
_REDUCTIONS = {
    "min": min,
    "median": statistics.median,
    "max": max,
    "sum": sum,
    "count": len,
}

# What is no prose: code, comments, and where links lead to.
_NO_PROSE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|(?<=\])\([^)]*\)", re.DOTALL)
# Versions and settings are numbers that nobody measured.
_SETTINGS = re.compile(
    r"(?:vLLM|Python|torch|CUDA|version|temperature|min-p|top-p|penalty|theta|goal)"
    rf"(?:\s+of)?\s+{_NUMBER}(?:(?:,| and| to| or)\s+{_NUMBER})*",
    re.IGNORECASE,
)
_MEASURED = re.compile(
    rf"(?<![\w.\-]){_NUMBER}\s?(?:(?:times|x|ms|us|µs|s|seconds?|minutes?|hours?|tokens/s|"
    rf"tokens (?:a|an|per) (?:second|iteration)|of (?:the )?\d+)\b|%)"
    r"|(?<![\w.\-])\d[\d,]*\.\d+(?![\w\-.]*\w)"
)


@dataclass(frozen=True)
class Figure:
    """A number in a page, and the place in a record that it is taken from."""

    shown: str
    record: Path
    place: str

    def value(self) -> float:
        """What the record says. Raises OSError or LookupError where it says nothing."""
        return look_up(json.loads(self.record.read_text()), self.place)

    def rendered(self) -> str:
        """The record's value as the page should show it, to as many decimals as it does."""
        return rounded(self.value(), len(self.shown.partition(".")[2]))


def pages() -> list[Path]:
    """The pages whose figures are held against records."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def figures(page: Path) -> list[Figure]:
    """The figures of a page, in its order."""
    return [_figure(found, page) for found in _FIGURE.finditer(page.read_text())]


def disagreements(page: Path) -> list[str]:
    """A sentence for every figure of the page that its record does not support."""
    found = []
    for figure in figures(page):
        try:
            value = figure.rendered()
        except (OSError, LookupError) as error:
            found.append(f"{page.name}: {figure.shown} ({figure.place}): {error}")
            continue
        if value != figure.shown:
            found.append(
                f"{page.name}: {figure.shown} is {value} in {figure.record.name} ({figure.place})"
            )
    return found


def updated(page: Path) -> str:
    """The page's text with the records' values in its figures."""

    def with_value(found: re.Match[str]) -> str:
        value = _figure(found, page).rendered()
        begin, end = (position - found.start() for position in found.span("shown"))
        return found[0][:begin] + value + found[0][end:]

    return _FIGURE.sub(with_value, page.read_text())


def untied(text: str) -> list[str]:
    """Numbers of a text that read like measurements and are not tied to a record."""
    prose = _NO_PROSE.sub(" ", _FIGURE.sub(" ", text))
    found = [match[0] for match in _MEASURED.finditer(_SETTINGS.sub(" ", prose))]
    return [number for number in found if number not in SUPPORTED_VLLM]


def look_up(record: Any, place: str) -> float:
    """The number at a place of a record (see the module). Raises LookupError."""
    above, over, below = place.partition(" over ")
    value = _number(_follow(record, above.split("/")), above)
    return value / _number(_follow(record, below.split("/")), below) if over else value


def rounded(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}"


def _figure(found: re.Match[str], page: Path) -> Figure:
    return Figure(found["shown"], page.parent / found["record"], found["place"])


def _follow(node: Any, steps: list[str]) -> Any:
    for i, step in enumerate(steps):
        if isinstance(node, dict):
            if step not in node:
                raise LookupError(f"no {step!r}")
            node = node[step]
        elif step.startswith("*"):
            *inner, reduction = steps[i + 1 :]
            values = [_follow(entry, inner) for entry in _having(node, step[1:])]
            return _entry(values, reduction)
        else:
            node = _entry(node, step)
    return node


def _entry(entries: list[Any], step: str) -> Any:
    if step in _REDUCTIONS:
        return _REDUCTIONS[step](entries)
    if step.isdigit():
        return entries[int(step)]
    found = _having(entries, step)
    if len(found) != 1:
        raise LookupError(f"{len(found)} entries have {step!r}")
    return found[0]


def _having(entries: list[Any], conditions: str) -> list[Any]:
    wanted = dict(pair.split("=", 1) for pair in conditions.split("&") if pair)
    return [
        entry
        for entry in entries
        if all(str(entry.get(key)) == value for key, value in wanted.items())
    ]


def _number(value: Any, place: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LookupError(f"no number at {place!r}")
    return value


def _all_disagreements() -> Iterator[str]:
    for page in pages():
        yield from disagreements(page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the records' values in")
    if parser.parse_args().write:
        for page in pages():
            page.write_text(updated(page))
    found = list(_all_disagreements())
    print("\n".join(found) or "every figure is its record's")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
