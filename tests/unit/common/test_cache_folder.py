"""Where things made once are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tokenswift.common.cache_folder import cache_home


def test_the_cache_moves_with_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSWIFT_HOME", str(tmp_path))
    assert cache_home() == tmp_path
