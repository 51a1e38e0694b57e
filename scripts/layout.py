"""Writes docs/layout.md: every folder and file of the package, each with its own first sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "layout.md"
PACKAGE = ROOT / "vllm_tokenswift"
HEADER = """# Layout

Every file of the package, with the first sentence of its docstring. Made by
`python scripts/layout.py`: edit the docstrings, not this page. Beside the package:
[`patches/`](../patches/__init__.py) (what is changed in vLLM, and what is relied upon there),
[`benchmarks/`](../benchmarks/results/README.md) (measurements and their records),
[`examples/`](../examples/offline.py), [`scripts/`](../scripts/install_vllm.py), and
[`tests/`](../tests/conftest.py), whose `unit/` mirrors the package.

How these work together: [how a step works](how-it-works.md).
"""


def page() -> str:
    """The whole page, as Markdown."""
    sections = [HEADER, *(_section(folder) for folder in _folders())]
    return "\n".join(sections)


def _folders() -> Iterator[Path]:
    """The package and the packages in it, from above to below."""
    yield from sorted({path.parent for path in PACKAGE.rglob("__init__.py")})


def _section(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    rows = [
        f"| [`{path.name}`](../{name}/{path.name}) | {sentence(path)} |" for path in _files(folder)
    ]
    return "\n".join(
        [
            f"## `{name}/`\n",
            sentence(folder / "__init__.py") + "\n",
            "| file | what it is |",
            "| --- | --- |",
            *rows,
            "",
        ]
        if rows
        else [f"## `{name}/`\n", sentence(folder / "__init__.py") + "\n"]
    )


def _files(folder: Path) -> list[Path]:
    paths = [*folder.glob("*.py"), *folder.glob("*.c")]
    return sorted(path for path in paths if path.name != "__init__.py")


def sentence(path: Path) -> str:
    """The first sentence of a file's docstring or leading comment, fit for a table."""
    text = path.read_text()
    if path.suffix == ".c":
        found = re.match(r"\s*/\*+(.*?)\*/", text, re.DOTALL)
        docstring = re.sub(r"\n\s*\* ?", "\n", found[1]) if found else ""
    else:
        docstring = ast.get_docstring(ast.parse(text)) or ""
    first = " ".join(docstring.strip().partition("\n\n")[0].split())
    first = re.split(r"(?<=[.:])\s(?=[A-Z:`])", first, maxsplit=1)[0].rstrip(":")
    first = re.sub(r" \(paper[^)]*\)", "", first)
    first = re.sub(r":(?:class|mod|func|meth|data|attr):`~?([^`]*)`", _last_name, first)
    return first.replace("``", "`").replace("|", "\\|")


def _last_name(role: re.Match[str]) -> str:
    return f"`{role[1].rpartition('.')[2]}`"


if __name__ == "__main__":
    PAGE.write_text(page())
