"""Applying patches: every target is checked before any is touched, and only once each."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_tokenswift import versions

from . import signatures

_MARK = "__tokenswift_patch__"


class PatchError(RuntimeError):
    """vLLM's code is not what a patch expects."""


@dataclass(frozen=True)
class Patch:
    """One change to vLLM.

    Attributes:
        target: ``"module:Class.attribute"`` or ``"module:function"``.
        kind: "replace": the target exists and our version calls the original; "add": it
            must not exist.
        why: what it is for.
        how: what it does.
        obsolete_when: the upstream change that would make it unnecessary.
        signature: vLLM release -> the target's signature there (:mod:`.signatures`);
            empty for "add".
        build: takes the original (a plain function, a property's getter for a property;
            None for "add") and returns the function that takes its place.
    """

    target: str
    kind: Literal["replace", "add"]
    why: str
    how: str
    obsolete_when: str
    signature: Mapping[str, str]
    build: Callable[[Any], Callable[..., Any]]


def apply(patches: Sequence[Patch], vllm_version: str) -> list[str]:
    """Applies what is not applied yet.

    Args:
        patches: all of them are checked first.
        vllm_version: whose signatures are expected.

    Returns:
        The targets of the patches that were not applied before.

    Raises:
        PatchError: naming every target that differs, before anything is changed.
    """
    found = [(patch, *_locate(patch)) for patch in patches]
    pending = [item for item in found if not _is_applied(item[0], item[3])]
    problems = [
        problem
        for patch, _, _, current in pending
        if (problem := _mismatch(patch, current, vllm_version)) is not None
    ]
    if problems:
        raise PatchError(
            f"TokenSwift cannot patch vLLM {vllm_version}; nothing was changed. "
            + "; ".join(problems)
        )
    for patch, owner, name, current in pending:
        setattr(owner, name, _replacement(patch, current))
    return [patch.target for patch, *_ in pending]


def _locate(patch: Patch) -> tuple[Any, str, Any]:
    """The object that holds the target, the target's name in it, and what is there now
    (None where nothing is)."""
    module_name, _, path = patch.target.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{patch.target} cannot be patched: {error}") from error
    return owner, name, inspect.getattr_static(owner, name, None)


def _function(attribute: Any) -> Any:
    """The plain function inside a property, static method or class method."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, staticmethod | classmethod):
        return attribute.__func__
    return attribute


def _is_applied(patch: Patch, current: Any) -> bool:
    return getattr(_function(current), _MARK, None) == patch.target


def _mismatch(patch: Patch, current: Any, vllm_version: str) -> str | None:
    if patch.kind == "add":
        return None if current is None else f"{patch.target} exists already"
    if current is None:
        return f"{patch.target} does not exist"
    expected = patch.signature[versions.reference_version(vllm_version)]
    actual = signatures.of_object(current)
    if actual != expected:
        return f"{patch.target} is {actual}, expected {expected}"
    return None


def _replacement(patch: Patch, current: Any) -> Any:
    function = patch.build(_function(current))
    setattr(function, _MARK, patch.target)
    if isinstance(current, property):
        return property(function, doc=current.__doc__)
    if isinstance(current, staticmethod | classmethod):
        return type(current)(function)
    return function
