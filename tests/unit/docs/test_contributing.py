"""CONTRIBUTING says of every module where it is tested, and pages name what is there."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest

from benchmarks.figures import ROOT

PACKAGE = ROOT / "vllm_tokenswift"
TESTS = ROOT / "tests"
BEGIN, END = "<!-- tested-elsewhere: begin -->", "<!-- tested-elsewhere: end -->"


def lines_of_the_table() -> dict[str, list[str]]:
    """The modules of CONTRIBUTING's table, and the files in tests/ that it names for each."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found: dict[str, list[str]] = {}
    for row in text[text.index(BEGIN) : text.index(END)].splitlines():
        if row.startswith("| `"):
            modules, tests = row.strip("| ").split(" | ")
            files = re.findall(r"`((?:unit|engine)/[^`]+)`", tests)
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", modules), files)
    return found


def modules() -> list[str]:
    paths = [p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"]
    return sorted(path.relative_to(PACKAGE).as_posix() for path in paths)


def has_mirror(module: str) -> bool:
    """Whether a test file of its own stands at a module's place."""
    folder, _, name = module.rpartition("/")
    unit = TESTS / "unit" / folder / f"test_{name}"
    engine = TESTS / "engine" / folder.removeprefix("engine").removeprefix("/") / f"test_{name}"
    return unit.exists() or engine.exists()


@pytest.mark.parametrize("module", modules())
def test_a_module_has_its_mirror_or_a_line_that_says_where_it_is_tested(module: str) -> None:
    assert has_mirror(module) or lines_of_the_table().get(module)


def test_the_lines_name_modules_and_tests_that_are_there() -> None:
    table = lines_of_the_table()
    assert sorted(set(table) - set(modules())) == []
    named = {test for tests in table.values() for test in tests}
    assert sorted(test for test in named if not (TESTS / test).exists()) == []


def test_every_file_of_the_package_has_its_line_in_the_layout() -> None:
    made: str = run_path(str(ROOT / "scripts" / "layout.py"))["page"]()
    row = re.compile(r"^\| \[.*?\]\((.*?)\) \| (.+) \|$", re.MULTILINE)
    lines = dict(row.findall((ROOT / "docs" / "layout.md").read_text()))
    assert sorted(lines) == sorted(dict(row.findall(made))), "run `make readme`"
    assert len(lines) > 100


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/how-it-works.md", "docs/glossary.md"], ids=lambda page: page
)
def test_files_that_a_page_names_are_there(page: str) -> None:
    """Paths of the package and beside it, as code or in the drawing."""
    text = (ROOT / page).read_text()
    named = set(re.findall(r"(?<![\w./-])((?:\w+/)+[\w.]*\w)(?=[`<,* ])", text))
    named |= set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text))
    roots = (ROOT, PACKAGE, TESTS)
    ours = {path for path in named if any((root / path.split("/")[0]).is_dir() for root in roots)}
    assert len(ours) > 10
    missing = {path for path in ours if not any((root / path).exists() for root in roots)}
    assert sorted(path for path in missing if not _is_made_up(path)) == []


def _is_made_up(path: str) -> bool:
    return path == "tests/unit/patches/data/signatures-X.Y.json"


def test_what_becomes_of_a_draft_is_where_the_page_says() -> None:
    """Each row of the table names files, and in its last column functions or classes of them."""
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    table = text.partition("## Where is a draft born")[2].partition("## ")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    found = 0
    for _, files, by in rows[2:]:
        paths = [path for name in re.findall(r"`([^`]+)`", files) for path in _files(name)]
        source = "\n".join(path.read_text() for path in paths)
        for name in re.findall(r"`([\w.]+)`", by):
            if not name.endswith(".py"):
                last = name.rpartition(".")[2]
                assert re.search(rf"\b(?:def|class) {last}\b", source), (files, name)
                found += 1
    assert found > 5


def _files(name: str) -> list[Path]:
    path = PACKAGE / name
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def test_a_missing_file_would_be_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(f"{__name__}.TESTS", tmp_path)
    assert not has_mirror("options.py")
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "test_drafter.py").touch()
    assert has_mirror("engine/drafter.py")
