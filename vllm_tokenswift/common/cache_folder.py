"""Where TokenSwift keeps what it made once: the demo model, measured costs, compiled code."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """``$TOKENSWIFT_HOME``, or ``~/.cache/vllm-tokenswift``."""
    home = os.environ.get("TOKENSWIFT_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "vllm-tokenswift"
