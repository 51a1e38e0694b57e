from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from vllm_tokenswift import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0+cpu", "0.32.1.dev3"])
def test_every_release_of_a_supported_minor_version_is_supported(version: str) -> None:
    assert versions.is_supported(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.320.0", "1.32.0", "dev"])
def test_other_versions_are_not_supported(version: str) -> None:
    assert not versions.is_supported(version)


def test_the_refusal_names_the_supported_versions_and_the_variable() -> None:
    sentence = versions.refusal("0.34.0")
    for part in ("0.32", "0.33", "0.34.0", "TOKENSWIFT_ALLOW_VLLM_VERSION=0.34.0"):
        assert part in sentence


def test_the_variable_allows_exactly_the_version_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(versions.ALLOW_VARIABLE, "0.34.0")
    assert versions.is_supported("0.34.0")
    assert not versions.is_supported("0.34.1")


def test_an_allowed_unknown_version_is_held_against_the_newest_known_one() -> None:
    assert versions.reference_version("0.34.0") == "0.33.0"
    assert versions.reference_version("0.32.7") == "0.32.0"


def test_the_readme_states_the_supported_versions() -> None:
    readme = (ROOT / "README.md").read_text()
    stated = re.search(r"vLLM ((?:\d+\.\d+(?:, | and )?)+), Python 3\.11 to 3\.13", readme)
    assert stated, "README.md has no line 'vLLM ..., Python 3.11 to 3.13'"
    assert re.findall(r"\d+\.\d+", stated.group(1)) == list(versions.SUPPORTED_VLLM)


def test_python_versions_are_the_ones_that_the_readme_states() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"


def test_packaging_reads_the_one_source() -> None:
    command = [sys.executable, "setup.py", "--quiet", "--name", "--version"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).returncode == 0
    text = (ROOT / "setup.py").read_text()
    assert not re.search(r"0\.3[0-9]", text)


def test_no_logits_processor_is_installed_for_every_vllm() -> None:
    # Model runner V2 refuses to start where a class in that group is not of its own kind.
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert list(scripts) == ["vllm.general_plugins"]
