"""vLLM's entry point ``vllm.general_plugins``: called in every process, maybe repeatedly.

This module imports little: vLLM swallows an error raised while it imports an entry
point, but not one raised by the function it then calls.
"""

from __future__ import annotations


def register() -> None:
    """Patches vLLM; changes nothing that can be seen until TokenSwift is asked for.

    On a vLLM version that is not supported it only warns, and refuses when asked for.

    Raises:
        PatchError: where a supported vLLM is not what the patches expect.
    """
    from vllm import __version__
    from vllm.logger import init_logger

    from vllm_tokenswift import versions
    from vllm_tokenswift.patches import MANIFEST, apply, refuse_when_asked_for

    if versions.is_supported(__version__):
        apply(MANIFEST, __version__)
        return
    init_logger(__name__).warning(
        "%s Until then vLLM runs as without it.", versions.refusal(__version__)
    )
    refuse_when_asked_for(__version__)
