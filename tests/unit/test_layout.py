"""The layout that docs/how-it-works.md draws: no circles, short chains, nothing left out."""

from __future__ import annotations

import pytest
from import_graph import circles, import_graph, longest_chain, modules

from vllm_tokenswift.common.compiled import compiled_sources

LONGEST_CHAIN_IN_DRAFT = 6  # files
COMPILED = "vllm_tokenswift.common.compiled"


def test_no_module_imports_one_that_imports_it() -> None:
    assert circles() == []


def test_drafting_is_read_in_few_steps() -> None:
    chain = longest_chain("vllm_tokenswift.draft")
    assert len(chain) <= LONGEST_CHAIN_IN_DRAFT, " -> ".join(chain)


def test_a_circle_and_a_chain_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = {"p.a": frozenset({"p.b"}), "p.b": frozenset({"p.c"}), "p.c": frozenset({"q"})}
    monkeypatch.setattr("import_graph.import_graph", lambda: {**graph, "q": frozenset()})
    assert (circles(), longest_chain("p")) == ([], ["p.a", "p.b", "p.c"])
    monkeypatch.setattr("import_graph.import_graph", lambda: {**graph, "q": frozenset({"p.b"})})
    assert circles() == [["p.b", "p.c", "q"]]


def test_all_that_is_compiled_makes_a_new_cache_folder_when_it_changes() -> None:
    """A file with compiled functions, and every file that it takes functions or numbers from."""
    graph, files = import_graph(), modules()
    compiled = {name for name, imported in graph.items() if COMPILED in imported}
    sources = compiled | {other for name in compiled for other in graph[name]}
    assert len(compiled) > 10
    assert sorted(files[name] for name in sources if files[name] not in compiled_sources()) == []
