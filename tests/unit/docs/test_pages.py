"""README.md is short, and what pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import index
from benchmarks.figures import ROOT

PAGES = [
    path
    for path in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        index.PAGE,
    )
    if path.exists()
]

_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Where a page's links lead, but for those to other sites."""
    found = _LINK.findall(_CODE.sub("", text))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = _HEADING.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        there = target.exists()
        if there and anchor and target.suffix == ".md":
            there = anchor in anchors(text if target == page else target.read_text())
        if not there:
            found.append(link)
    return found


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readme_says_what_the_same_tokens_are_before_its_first_figure_of_speed() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.index("float32") < text.index("bfloat16") < text.index("speedup")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_is_there(page: Path) -> None:
    assert broken(page, page.read_text()) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `two`, three\n")
    text = """# A page
    [1](there.md) [2](there.md "with a title") [3](there.md#one-two-three) [4](#a-page)
    [5](https://example.org/none.md) `[6](code.md)`
    [7](none.md) [8](there.md#four) [9](#none) [10](none.json "with/a=title")"""
    page = tmp_path / "page.md"
    page.write_text(text)
    assert broken(page, text) == ["none.md", "there.md#four", "#none", "none.json"]
