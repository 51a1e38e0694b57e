from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_tokenswift import versions
from vllm_tokenswift.patches import MANIFEST, Patch, PatchError, apply, refuse_when_asked_for
from vllm_tokenswift.patches.signatures import of_object

REFERENCE = "0.32.0"


class Target:
    def method(self, a: int, b: int = 2) -> tuple[str, int, int]:
        return "original", a, b

    @property
    def number(self) -> int:
        return 1

    @staticmethod
    def static(parser: str) -> str:
        return parser


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module of our own to patch, so that vLLM's stays what the other tests expect."""
    name = "module_to_patch"
    made = types.ModuleType(name)
    made.Target = type("Target", (), dict(vars(Target)))  # type: ignore[attr-defined]
    sys.modules[name] = made
    yield made
    del sys.modules[name]


def patch(attribute: str, signature: str, kind: Any = "replace", **changes: Any) -> Patch:
    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        if original is None:
            return lambda self: "added"
        return lambda *args, **kwargs: ("patched", original(*args, **kwargs))

    fields: dict[str, Any] = {
        "target": f"module_to_patch:Target.{attribute}",
        "kind": kind,
        "why": "",
        "how": "",
        "obsolete_when": "",
        "signature": {REFERENCE: signature},
        "build": build,
    }
    return Patch(**{**fields, **changes})


def test_a_patch_replaces_methods_properties_and_static_methods(module: Any) -> None:
    applied = apply(
        [
            patch("method", "(self, a, b=)"),
            patch("number", "property(self)"),
            patch("static", "staticmethod(parser)"),
        ],
        REFERENCE,
    )
    assert len(applied) == 3
    target = module.Target()
    assert target.method(1) == ("patched", ("original", 1, 2))
    assert target.number == ("patched", 1)
    assert module.Target.static("p") == ("patched", "p")


def test_applying_twice_changes_nothing(module: Any) -> None:
    patches = [patch("method", "(self, a, b=)"), patch("number", "property(self)")]
    apply(patches, REFERENCE)
    before = dict(vars(module.Target))
    assert apply(patches, REFERENCE) == []
    assert dict(vars(module.Target)) == before


def test_nothing_is_changed_when_one_of_several_targets_has_another_signature(
    module: Any,
) -> None:
    before = dict(vars(module.Target))
    with pytest.raises(PatchError, match=r"Target\.number is property\(self\), expected"):
        apply([patch("method", "(self, a, b=)"), patch("number", "(self)")], REFERENCE)
    assert dict(vars(module.Target)) == before


def test_every_target_that_differs_is_named(module: Any) -> None:
    with pytest.raises(PatchError) as error:
        apply([patch("method", "(self)"), patch("gone", "(self)")], REFERENCE)
    assert "Target.method is (self, a, b=), expected (self)" in str(error.value)
    assert "Target.gone does not exist" in str(error.value)


def test_a_module_that_does_not_exist_is_named(module: Any) -> None:
    with pytest.raises(PatchError, match=r"no_such_module:X\.y"):
        apply([patch("method", "(self)", target="no_such_module:X.y")], REFERENCE)


def test_an_addition_must_not_exist(module: Any) -> None:
    assert apply([patch("new", "", kind="add")], REFERENCE)
    assert module.Target().new() == "added"
    with pytest.raises(PatchError, match=r"Target\.method exists already"):
        apply([patch("method", "", kind="add")], REFERENCE)


def test_the_manifest_says_of_every_patch_what_it_is_for() -> None:
    for entry in MANIFEST:
        assert entry.why
        assert entry.how
        assert entry.obsolete_when
        assert set(entry.signature) == set(versions.SUPPORTED_VLLM.values())
    assert len({entry.target for entry in MANIFEST}) == len(MANIFEST)


def test_registering_twice_patches_vllm_once() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tokenswift.plugin import register

    register()
    once = EngineArgs.create_speculative_config
    register()
    assert EngineArgs.create_speculative_config is once
    assert of_object(once.__wrapped__) == of_object(once)  # type: ignore[attr-defined]


def test_an_unsupported_vllm_refuses_only_what_names_tokenswift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    calls: list[Any] = []
    # Stands for an unknown version's method, whose signature nobody knows.
    monkeypatch.setattr(
        EngineArgs, "create_speculative_config", lambda self, *args: calls.append(args)
    )
    refuse_when_asked_for("0.99.0")
    plain = types.SimpleNamespace(speculative_config={"method": "ngram"}, spec_method=None)
    EngineArgs.create_speculative_config(plain, 1, 2, 3)  # type: ignore[arg-type, call-arg]
    assert calls == [(1, 2, 3)]
    asked = types.SimpleNamespace(speculative_config=None, spec_method="tokenswift")
    with pytest.raises(ValueError, match=r"supports vLLM 0\.32 and 0\.33; this is vLLM 0\.99\.0"):
        EngineArgs.create_speculative_config(asked, 1)  # type: ignore[arg-type, call-arg]


def test_the_entry_point_refuses_and_warns_on_an_unsupported_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tokenswift import plugin

    original = EngineArgs.create_speculative_config
    while hasattr(original, "__wrapped__"):
        original = original.__wrapped__
    monkeypatch.setattr(EngineArgs, "create_speculative_config", original)
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delenv(versions.ALLOW_VARIABLE, raising=False)
    plugin.register()
    with pytest.raises(ValueError, match=versions.ALLOW_VARIABLE):
        EngineArgs.create_speculative_config(
            types.SimpleNamespace(speculative_config={"method": "tokenswift"})  # type: ignore[arg-type, call-arg]
        )
