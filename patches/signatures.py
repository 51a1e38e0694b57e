"""Signatures in one written form, so that live code and unimported source compare.

Names, kinds and the presence of defaults are written; annotations and the values of
defaults are not, because they move without breaking a caller.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from typing import Any

# (name, kind, has a default)
_Parameter = tuple[str, "inspect._ParameterKind", bool]


def of_object(attribute: Any) -> str:
    """The signature of a live object.

    Args:
        attribute: of a class or module, as ``inspect.getattr_static`` gives it.

    Returns:
        The written form.
    """
    if isinstance(attribute, property):
        return f"property{of_object(attribute.fget)}"
    if isinstance(attribute, staticmethod):
        return f"staticmethod{of_object(attribute.__func__)}"
    if isinstance(attribute, classmethod):
        return f"classmethod{of_object(attribute.__func__)}"
    parameters = inspect.signature(attribute).parameters.values()
    return _written((p.name, p.kind, p.default is not inspect.Parameter.empty) for p in parameters)


def of_definition(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The signature of a function in source that was not imported.

    Args:
        definition: its syntax tree.

    Returns:
        The written form, the same as the live function's.
    """
    prefix = ""
    for decorator in definition.decorator_list:
        name = decorator.attr if isinstance(decorator, ast.Attribute) else None
        name = decorator.id if isinstance(decorator, ast.Name) else name
        if name in ("property", "staticmethod", "classmethod", "cached_property"):
            prefix = name
    arguments = definition.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parameters: list[_Parameter] = []
    for i, argument in enumerate(positional):
        kind = (
            inspect.Parameter.POSITIONAL_ONLY
            if i < len(arguments.posonlyargs)
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
        )
        parameters.append((argument.arg, kind, i >= first_default))
    if arguments.vararg:
        parameters.append((arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((argument.arg, inspect.Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, False))
    return prefix + _written(parameters)


def _written(parameters: Iterable[_Parameter]) -> str:
    words: list[str] = []
    keyword_only = False
    for name, kind, has_default in parameters:
        if kind is inspect.Parameter.VAR_POSITIONAL:
            keyword_only = True
            words.append(f"*{name}")
            continue
        if kind is inspect.Parameter.VAR_KEYWORD:
            words.append(f"**{name}")
            continue
        if kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        words.append(f"{name}=" if has_default else name)
    return f"({', '.join(words)})"
