"""Which members of vLLM's objects our source reads, worked out from the source alone.

Types are followed as far as names tell them: from parameters by their annotations, from the
runner by its name, and from one object to the next by :data:`LEADS`. What is reached in another
way is not seen; mypy keeps collaborators to what the runner's view names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

RUNNER = "GPUModelRunner"

# Class -> its members that lead on to others: the class of what they are, "[]" before it where
# that has to be subscripted.
LEADS: dict[str, dict[str, str]] = {
    RUNNER: {
        "attn_groups": "[][]AttentionGroup",
        "cudagraph_dispatcher": "CudagraphDispatcher",
        "discard_request_mask": "CpuGpuBuffer",
        "execute_model_state": "ExecuteModelState",
        "input_batch": "InputBatch",
        "input_ids": "CpuGpuBuffer",
        "kv_cache_config": "KVCacheConfig",
        "model_config": "ModelConfig",
        "query_start_loc": "CpuGpuBuffer",
        "requests": "[]CachedRequestState",
        "sampler": "Sampler",
        "vllm_config": "VllmConfig",
    },
    "InputBatch": {"block_table": "MultiGroupBlockTable"},
    "MultiGroupBlockTable": {},
    "BlockTable": {"slot_mapping": "CpuGpuBuffer"},
    "CachedRequestState": {"sampling_params": "SamplingParams"},
    "CpuGpuBuffer": {},
    "AttentionGroup": {},
    "CudagraphDispatcher": {},
    "ExecuteModelState": {},
    "KVCacheConfig": {"kv_cache_tensors": "[]KVCacheTensor"},
    "KVCacheTensor": {},
    "SchedulerOutput": {
        "scheduled_cached_reqs": "CachedRequestData",
        "scheduled_new_reqs": "[]NewRequestData",
    },
    "CachedRequestData": {},
    "NewRequestData": {},
    "Sampler": {},
    "SamplingParams": {},
    "SpecDecodeMetadata": {},
    "VllmConfig": {},
    "ModelConfig": {},
}
# Names that mean the same wherever they stand.
NAMES = {"runner": RUNNER, "_runner": RUNNER, "model_runner": RUNNER, "vllm_config": "VllmConfig"}
_ITEMS = {"MultiGroupBlockTable": "BlockTable"}  # what subscripting gives that calls a method

# vLLM's runners and workers, by the names that our classes derive from.
_BASES = ("_Runner", RUNNER, "CPUModelRunner", "_Worker", "Worker", "CPUWorker")

Use = tuple[str, str]
"""A class of vLLM's and the name of a member."""


def runner_files(package: Path) -> list[Path]:
    """Files with classes that derive from vLLM's runner or worker, bases before what derives."""
    classes = runner_classes(package)
    waiting = {path: _classes(path, classes) for path in sorted(package.rglob("*.py"))}
    waiting = {path: found for path, found in waiting.items() if found}
    files: list[Path] = []
    while waiting:
        undefined = {node.name for found in waiting.values() for node in found}
        ready = [
            path
            for path, found in waiting.items()
            if not (undefined - {node.name for node in found})
            & {base for node in found for base in map(_last_name, node.bases)}
        ]
        files += ready
        for path in ready:
            del waiting[path]
    return files


def runner_classes(package: Path) -> set[str]:
    """Names of vLLM's runner and worker classes, and of ours that derive from them."""
    classes, paths = set(_BASES), list(package.rglob("*.py"))
    while True:
        found = {node.name for path in paths for node in _classes(path, classes)}
        if found <= classes:
            return classes
        classes |= found


def _classes(path: Path, bases: set[str]) -> list[ast.ClassDef]:
    """A file's classes that derive from one of these."""
    return [
        node
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.ClassDef) and bases & set(map(_last_name, node.bases))
    ]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def uses(package: Path) -> dict[Use, list[str]]:
    """Members that are read in a package, and in which files."""
    classes = runner_classes(package)
    found: dict[Use, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for use in uses_in(path.read_text(), classes):
            files = found.setdefault(use, [])
            if path.as_posix() not in files:
                files.append(path.as_posix())
    return found


def uses_in(source: str, classes: Iterable[str] = ()) -> list[Use]:
    """The members that a module reads.

    Args:
        source: the module's.
        classes: names of classes that derive from vLLM's runner or worker; members of
            their own ``self`` are not listed, those that these lead to are.
    """
    reader = _Reader(set(classes))
    reader.visit(ast.parse(source))
    return reader.uses


def members_of(source: str, class_name: str) -> set[str]:
    """Names that a class's body defines."""
    [definition] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == class_name
    ]
    return set(_names_defined(definition.body))


def _names_defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


class _Reader(ast.NodeVisitor):
    """Reads a module from above to below; ``known``: the classes of the names in scope."""

    def __init__(self, runner_classes: set[str]) -> None:
        self.uses: list[Use] = []
        self.known: dict[str, str] = {}
        self._runner_classes = runner_classes
        self._is_runner = False

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before = self._is_runner
        self._is_runner = bool(self._runner_classes & {node.name, *map(_last_name, node.bases)})
        self.generic_visit(node)
        self._is_runner = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside, self.known = self.known, dict(self.known)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.known.pop(argument.arg, None)
            for name in _names_in(argument.annotation):
                if name in LEADS:
                    self.known[argument.arg] = name
        self.generic_visit(node)
        self.known = outside

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._bind(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind_item(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_item(node.target, node.iter)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_comprehensions(node)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_comprehensions(node)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_comprehensions(node)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehensions(node)

    def _visit_comprehensions(
        self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
    ) -> None:
        """What is bound before what uses it, though it stands behind it."""
        for generator in node.generators:
            self.visit(generator)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._class_of(node.value)
        if owner in LEADS and not self._is_self(node.value):
            self.uses.append((owner, node.attr))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        owner = self._class_of(node.value)
        if owner in _ITEMS:
            self.uses.append((owner, "__getitem__"))
        self.generic_visit(node)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for inner, part in zip(target.elts, value.elts, strict=False):
                self._bind(inner, part)
        else:
            self._bind_to(target, self._class_of(value))

    def _bind_item(self, target: ast.expr, iterated: ast.expr) -> None:
        self._bind_to(target, _item(self._class_of(iterated)))

    def _bind_to(self, target: ast.expr, class_name: str | None) -> None:
        if isinstance(target, ast.List) and len(target.elts) == 1:
            self._bind_to(target.elts[0], _item(class_name))
        elif isinstance(target, ast.Name):
            self.known.pop(target.id, None)
            if class_name is not None:
                self.known[target.id] = class_name

    def _class_of(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                if self._is_self(node):
                    return RUNNER
                return self.known.get(name, NAMES.get(name))
            case ast.Attribute(value=value, attr=name):
                owner = self._class_of(value)
                return LEADS.get(owner or "", {}).get(name, NAMES.get(name))
            case ast.Subscript(value=value):
                owner = self._class_of(value)
                return _ITEMS.get(owner or "", _item(owner))
            case ast.Call(func=ast.Attribute(value=value, attr="values")):
                return self._class_of(value)
            case ast.Call(func=ast.Attribute(value=value, attr="get" | "pop")):
                return _item(self._class_of(value))
        return None

    def _is_self(self, node: ast.expr) -> bool:
        return self._is_runner and isinstance(node, ast.Name) and node.id == "self"


def _item(class_name: str | None) -> str | None:
    if class_name is None or not class_name.startswith("[]"):
        return None
    return class_name.removeprefix("[]")


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _names_in(annotation: ast.expr | None) -> Iterator[str]:
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
