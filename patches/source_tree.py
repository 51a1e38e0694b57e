"""vLLM's source read without importing it: what stands there under a dotted name.

Used by the drift tests, which must also read a vLLM that is not installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from . import signatures

_COMPOUND = (ast.If, ast.Try, ast.With)


class SourceTree:
    """A release's source.

    Args:
        root: the directory that holds the package ``vllm``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._parse = lru_cache(maxsize=None)(self._parse_file)

    def describe(self, target: str) -> str | None:
        """What stands under a name.

        Args:
            target: ``"module:name"`` or ``"module:Class.member"``.

        Returns:
            A function's signature, or "class", "field" (of a class or module), "attribute"
            (set on ``self`` in a method), or "module"; None where it is missing.
        """
        module, _, path = target.partition(":")
        name, _, member = path.partition(".")
        found = self._find(module, name)
        if found is None:
            return "module" if self._path(f"{module}.{name}") else None
        if not member:
            return _kind(found)
        if not isinstance(found, ast.ClassDef):
            return None
        for statement in _named(found.body, member):
            return _kind(statement)
        return "attribute" if _sets_attribute(found, member) else None

    def _find(self, module: str, name: str) -> ast.stmt | None:
        """The statement that defines ``name``, followed through imports."""
        path = self._path(module)
        if path is None:
            return None
        for statement in _named(self._parse(path).body, name):
            if not isinstance(statement, ast.ImportFrom):
                return statement
            original = next(a.name for a in statement.names if (a.asname or a.name) == name)
            return self._find(self._absolute(module, path, statement), original)
        for statement in self._parse(path).body:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                found = self._find(self._absolute(module, path, statement), name)
                if found is not None:
                    return found
        return None

    def _absolute(self, module: str, path: Path, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = module.split(".")
        depth = statement.level - (path.name == "__init__.py")
        package = parts[: len(parts) - depth]
        return ".".join([*package, *([statement.module] if statement.module else [])])

    def _path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        return None

    @staticmethod
    def _parse_file(path: Path) -> ast.Module:
        return ast.parse(path.read_text())


def _named(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Statements that give ``name`` a meaning, those under ``if`` and ``try`` included."""
    for statement in body:
        if isinstance(statement, _COMPOUND):
            for field in ("body", "orelse", "finalbody"):
                yield from _named(getattr(statement, field, []), name)
        elif _defines(statement, name):
            yield statement


def _defines(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.AnnAssign(target=ast.Name(id=target)):
            return target == name
        case ast.Assign(targets=targets):
            return any(isinstance(t, ast.Name) and t.id == name for t in targets)
        case ast.ImportFrom(names=names):
            return any((alias.asname or alias.name) == name for alias in names)
        case _:
            return False


def _kind(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return signatures.of_definition(statement)
        case ast.ClassDef():
            return "class"
        case _:
            return "field"


def _sets_attribute(definition: ast.ClassDef, name: str) -> bool:
    for node in ast.walk(definition):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
            and node.attr == name
        ):
            return True
    return False


def names_imported_from_vllm(package: Path) -> dict[str, list[str]]:
    """Every ``from vllm... import name`` in a package of ours.

    Args:
        package: its folder.

    Returns:
        target -> files that import it, relative to the folder.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                module = node.module or ""
                if module == "vllm" or module.startswith("vllm."):
                    for alias in node.names:
                        target = f"{module}:{alias.name}"
                        found.setdefault(target, []).append(str(path.relative_to(package)))
    return found
