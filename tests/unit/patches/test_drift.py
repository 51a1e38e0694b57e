"""Everything relied upon in vLLM stands where it stood, read without importing vLLM."""

from __future__ import annotations

import ast
import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from vllm_tokenswift import versions
from vllm_tokenswift.patches import MANIFEST
from vllm_tokenswift.patches.source_tree import SourceTree

ROOT = Path(__file__).resolve().parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "signatures.py"))
SEAMS: list[str] = SCRIPT["seams"]()
RELEASES = list(versions.SUPPORTED_VLLM.values())
# Where our runner and workers use vLLM's through `self`.
RUNNER_FILES = (
    "engine/runner.py",
    "engine/worker.py",
    "cpu/runner.py",
    "cpu/worker.py",
    "cuda/runner.py",
)


def snapshot(version: str) -> dict[str, str | None]:
    path: Path = SCRIPT["snapshot_path"](version)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def installed() -> SourceTree:
    return SourceTree(SCRIPT["installed_source"]())


@pytest.mark.parametrize("target", SEAMS)
def test_a_seam_stands_in_the_installed_vllm_as_it_did(target: str, installed: SourceTree) -> None:
    expected = snapshot(versions.reference_version(SCRIPT["installed_version"]()))
    assert installed.describe(target) == expected.get(target), target


@pytest.mark.parametrize("release", RELEASES)
def test_every_seam_exists_in_every_supported_release(release: str) -> None:
    recorded = snapshot(release)
    assert sorted(recorded) == SEAMS, "the seams have changed: run `make signatures`"
    assert [target for target, signature in recorded.items() if signature is None] == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("patch", MANIFEST, ids=lambda patch: patch.target)
def test_a_patch_expects_what_the_release_has(patch: Any, release: str) -> None:
    assert patch.signature[release] == snapshot(release)[patch.target]


def test_every_part_of_vllm_s_runner_that_ours_touches_is_in_the_seam_table() -> None:
    used: set[str] = set()
    ours: set[str] = set()
    for name in RUNNER_FILES:
        path = ROOT / "vllm_tokenswift" / name
        assert path.exists(), f"{name} has moved: name it anew in RUNNER_FILES"
        _collect(ast.parse(path.read_text()), used, ours)
    table = tomllib.loads((ROOT / "patches" / "seams.toml").read_text())
    listed = {member for entry in table.values() for member in entry["members"]}
    assert sorted(used - ours - listed) == []


def test_vllm_begins_to_watch_for_compilation_when_its_own_warm_up_is_over() -> None:
    """Our worker for CUDA starts drafting where vLLM begins to watch: seeded and warmed up, and
    before the garbage collector is told what stays."""
    source = SCRIPT["installed_source"]() / "vllm" / "v1" / "worker" / "gpu_worker.py"
    lines = [line.strip() for line in source.read_text().splitlines()]
    watching = lines.index("self._maybe_activate_jit_monitor()")
    assert lines.count("self._maybe_activate_jit_monitor()") == 1
    assert lines.index("set_random_seed(") < watching < lines.index("freeze_gc_heap()")


def _collect(tree: ast.Module, used: set[str], ours: set[str]) -> None:
    """Adds the names that a file reads on ``self`` or calls on ``super()``, and those that
    its own classes define."""
    ours_before = set(ours)
    overridden: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef):
                    ours.add(statement.name)
                elif isinstance(statement, ast.AnnAssign) and isinstance(
                    statement.target, ast.Name
                ):
                    ours.add(statement.target.id)
        if not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            (ours if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()":
            overridden.add(node.attr)
    # A method that ours extends is a seam, though the name is defined here too; unless an
    # earlier file of ours began it.
    overridden -= ours_before
    ours -= overridden
    used |= overridden


def test_a_moved_seam_is_reported_by_name() -> None:
    found = {"a:f": "(x, y)", "a:g": None, "a:h": "(z)"}
    expected = {"a:f": "(x)", "a:g": "(y)", "a:h": "(z)"}
    assert SCRIPT["differences"](found, expected) == [
        "a:f: (x, y), expected (x)",
        "a:g: missing, expected (y)",
    ]


def test_source_is_described_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import *\nfrom .inner import f as renamed\n")
    (package / "inner.py").write_text(
        "raise RuntimeError('imported')\n"
        "try:\n    import nothing\nexcept ImportError:\n    LIMIT = 3\n"
        "def f(a, b=1, *args, c, d=2, **rest): ...\n"
        "class C:\n"
        "    size: int = 0\n"
        "    @property\n    def p(self): ...\n"
        "    def __init__(self):\n        self.made = 1\n"
    )
    tree = SourceTree(tmp_path)
    assert tree.describe("pkg:renamed") == "(a, b=, *args, c, d=, **rest)"
    assert tree.describe("pkg:C") == "class"
    assert tree.describe("pkg:C.p") == "property(self)"
    assert tree.describe("pkg.inner:C.size") == "field"
    assert tree.describe("pkg:C.made") == "attribute"
    assert tree.describe("pkg:inner") == "module"
    assert tree.describe("pkg:C.gone") is None
    assert tree.describe("pkg.gone:f") is None
