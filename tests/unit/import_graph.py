"""Which module of the project imports which, annotations' imports included."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("vllm_tokenswift", "patches")
INSTALLED_PATCHES = "vllm_tokenswift.patches"


def modules() -> dict[str, Path]:
    """Dotted names of all modules (``patches`` by its folder's name), and their files."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def import_graph() -> dict[str, frozenset[str]]:
    """Every module and the project's modules that it imports, wherever the import stands."""
    known = modules()
    return {name: frozenset(_imports(name, path, known)) for name, path in known.items()}


def _imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package.split(".")[: len(package.split(".")) - node.level + 1]
                module = ".".join([*base, *([module] if module else [])])
            module = module.replace(INSTALLED_PATCHES, "patches", 1)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(inner if inner in known else module)
    return (found & known.keys()) - {name}


def circles() -> list[list[str]]:
    """Modules that import each other, directly or by way of others: a sorted list a circle."""
    graph = import_graph()
    reach = {name: _reachable(name, graph) for name in graph}
    found = {tuple(sorted(o for o in reach[n] if n in reach[o])) for n in graph if n in reach[n]}
    return sorted(map(list, found))


def _reachable(start: str, graph: dict[str, frozenset[str]]) -> set[str]:
    """What is reached by one import or more."""
    seen: set[str] = set()
    open_ends = list(graph[start])
    while open_ends:
        name = open_ends.pop()
        if name not in seen:
            seen.add(name)
            open_ends += graph[name]
    return seen


def longest_chain(package: str) -> list[str]:
    """The longest chain of imports that stays in a package without circles."""
    graph = import_graph()

    @cache
    def from_(name: str) -> tuple[str, ...]:
        inner = (from_(other) for other in graph[name] if other.startswith(package + "."))
        return (name, *max(inner, key=len, default=()))

    return list(max((from_(name) for name in graph if name.startswith(package + ".")), key=len))
