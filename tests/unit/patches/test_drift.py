"""Everything relied upon in vLLM stands where it stood, read without importing vLLM."""

from __future__ import annotations

import ast
import json
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from seam_uses import RUNNER, members_of, runner_files, uses, uses_in

from vllm_tokenswift import versions
from vllm_tokenswift.patches import MANIFEST
from vllm_tokenswift.patches.source_tree import SourceTree

ROOT = Path(__file__).resolve().parents[3]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "signatures.py"))
SEAMS: list[str] = SCRIPT["seams"]()
RELEASES = list(versions.SUPPORTED_VLLM.values())
PACKAGE = ROOT / "vllm_tokenswift"


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


def listed_members() -> dict[str, set[str]]:
    """What the seam table lists, by class; a runner's or worker's own may stand in a base."""
    table = tomllib.loads((ROOT / "patches" / "seams.toml").read_text())
    return {owner.rpartition(":")[2]: set(entry["members"]) for owner, entry in table.items()}


def own_names() -> tuple[set[str], set[str]]:
    """Names that our runners and workers read on themselves, and those that are ours."""
    used: set[str] = set()
    ours: set[str] = set()
    for path in runner_files(PACKAGE):
        _collect(ast.parse(path.read_text()), used, ours)
    return used, ours


def test_every_part_of_vllm_s_runner_that_ours_touches_is_in_the_seam_table() -> None:
    used, ours = own_names()
    assert len(used - ours) > 40
    assert sorted(used - ours - set.union(*listed_members().values())) == []


def test_what_is_read_of_vllm_s_objects_is_in_the_seam_table() -> None:
    """The runner's members, and those of its batch, requests, block tables, buffers, ..."""
    listed, (_, ours) = listed_members(), own_names()
    ours |= members_of((PACKAGE / "engine" / "runner_view.py").read_text(), "RunnerView")
    found = uses(PACKAGE)
    missing = {
        f"{owner}.{member}": files
        for (owner, member), files in found.items()
        if member not in listed.get(owner, ()) and not (owner == RUNNER and member in ours)
    }
    assert missing == {}
    # What the search must be able to see.
    assert {
        (RUNNER, "kv_cache_config"),
        ("CachedRequestState", "block_ids"),
        ("MultiGroupBlockTable", "commit_block_table"),
        ("BlockTable", "num_blocks_per_row"),
        ("InputBatch", "req_id_to_index"),
    } <= found.keys()


def test_what_collaborators_may_read_of_vllm_s_runner_is_in_the_seam_table() -> None:
    view = (PACKAGE / "engine" / "runner_view.py").read_text()
    members = members_of(view, "VLLMRunnerView")
    assert len(members) > 20
    assert sorted(members - listed_members()[RUNNER]) == []
    read = {member for owner, member in uses(PACKAGE) if owner == RUNNER}
    assert sorted(members - read) == [], "nobody reads these: the view is wider than it need be"


def test_files_of_runners_and_workers_are_found_bases_first() -> None:
    names = [path.relative_to(PACKAGE).as_posix() for path in runner_files(PACKAGE)]
    order = ["engine/platform.py", "engine/runner.py", "cpu/runner.py"]
    assert sorted(order, key=names.index) == order
    assert names.index("engine/worker.py") < names.index("cpu/worker.py")
    assert {*order, "engine/worker.py", "cpu/worker.py", "cuda/runner.py"} == set(names)


def test_a_member_is_seen_however_it_is_come_by() -> None:
    source = """
class Ours(Runner):
    def hook(self, scheduler_output: SchedulerOutput | None) -> None:
        self.own.thing
        [[group]] = self.attn_groups
        group.layer_names
        self.input_batch.num_reqs
        batch, table = self.input_batch, self.input_batch.block_table[0]
        table.slot_mapping.gpu[:3]
        batch.num_rows
        batch = other()
        batch.unknown
        for new in scheduler_output.scheduled_new_reqs:
            new.req_id

class Collaborator:
    def __init__(self, runner):
        self._runner, self.input_batch = runner, None
        self.input_batch.unknown

    def work(self, requests):
        runner = self._runner
        blocks = [request.block_ids for request in runner.requests.values()]
        runner.requests[0].sampling_params.seed
        lambda: runner.model(0)
        requests[0].unknown
"""
    found = set(uses_in(source, {"Runner"})) - {(RUNNER, "requests")}
    assert found == {
        ("AttentionGroup", "layer_names"),
        ("InputBatch", "num_reqs"),
        ("InputBatch", "block_table"),
        ("InputBatch", "num_rows"),
        ("MultiGroupBlockTable", "__getitem__"),
        ("BlockTable", "slot_mapping"),
        ("CpuGpuBuffer", "gpu"),
        ("SchedulerOutput", "scheduled_new_reqs"),
        ("NewRequestData", "req_id"),
        ("CachedRequestState", "block_ids"),
        ("CachedRequestState", "sampling_params"),
        ("SamplingParams", "seed"),
        (RUNNER, "model"),
    }


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
