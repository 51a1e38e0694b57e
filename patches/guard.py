"""On a vLLM that is not supported: everything as without us, and a refusal when asked for."""

from __future__ import annotations

import functools
from typing import Any

from vllm_tokenswift import versions
from vllm_tokenswift.speculative_config import is_asked_for

_NAME = "create_speculative_config"


def refuse_when_asked_for(vllm_version: str) -> None:
    """Makes this vLLM refuse TokenSwift's configuration with our own sentence.

    Nothing is known about that version's code, so where it has no such place nothing is
    done: vLLM then refuses the unknown method itself.

    Args:
        vllm_version: which is not supported.
    """
    from vllm.engine.arg_utils import EngineArgs

    original: Any = getattr(EngineArgs, _NAME, None)
    if original is None or hasattr(original, "__tokenswift_guard__"):
        return

    @functools.wraps(original)
    def refusing(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if is_asked_for(self):
            raise ValueError(versions.refusal(vllm_version))
        return original(self, *args, **kwargs)

    refusing.__tokenswift_guard__ = True  # type: ignore[attr-defined]
    setattr(EngineArgs, _NAME, refusing)
