"""Every change that TokenSwift makes to vLLM's own code, in one manifest.

Installed as ``vllm_tokenswift.patches``. See :mod:`.manifest` for the list and
:mod:`.apply` for how it is applied.
"""

from .apply import Patch, PatchError, apply
from .guard import refuse_when_asked_for
from .manifest import MANIFEST

__all__ = ["MANIFEST", "Patch", "PatchError", "apply", "refuse_when_asked_for"]
