"""Inner loops as machine code (numba), compiled once per machine.

What is decorated with :func:`entry` is called from Python and kept on disk. What is decorated
with :func:`inner` is called by compiled code only and becomes part of its callers.

Types are fixed by convention, so that one specialisation of each suffices: token ids, nodes
and places are int32 in arrays, numbers that are passed alone are Python's, chances are float64.
Arrays that belong together cross from Python as a tuple, which numba recognises faster than a
NamedTuple, and get their names inside.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from llvmlite.binding import ffi
from numba import config, njit

from vllm_tokenswift.common.cache_folder import cache_home

CACHE_NAME = "compiled"

PACKAGE = Path(__file__).parent.parent
# Folders and files, below the package, that compiled code is made of: a test holds this list
# against the imports. What stands there makes a new cache folder wherever it changes.
COMPILED_SOURCES = (
    "common",
    "draft",
    "tree.py",
    "engine/row_layout.py",
    "cuda/attention/ancestor_rows.py",
)

# When a CPU worker of vLLM starts, it reads ``vars(...)`` of whatever the modules imported so
# far hold (``triton_utils/dispatcher.py``). llvmlite's library would look for a C function of
# the name ``__dict__``, and vLLM would fail on what comes back.
ffi.lib._fntab["__dict__"] = {}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_sources() -> list[Path]:
    """Every file of :data:`COMPILED_SOURCES`, folders with all that is below them, sorted."""
    paths = [PACKAGE / name for name in COMPILED_SOURCES]
    return sorted(
        source for path in paths for source in ([path] if path.is_file() else path.rglob("*.py"))
    )


@functools.cache
def _folder() -> str:
    """A folder of its own for every state of the sources.

    numba notices that a function's own file has changed, not that a file has whose functions
    it calls. Below ``NUMBA_CACHE_DIR``, or else below TokenSwift's own folder, because the
    package itself may lie where nothing can be written.
    """
    digest = hashlib.sha256()
    for source in compiled_sources():
        digest.update(source.read_bytes())
    return str(Path(config.CACHE_DIR or cache_home() / CACHE_NAME) / digest.hexdigest()[:16])


def everything_compiled() -> Path:
    """A file that is there where a process has compiled all of drafting and kept it."""
    return Path(_folder()) / "everything"


def entry(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiles a function when it is first called, or loads what an earlier process compiled.

    Where nothing can be kept on disk, every process compiles for itself.
    """
    chosen = config.CACHE_DIR
    try:
        config.CACHE_DIR = _folder()
        compiled: Callable[_P, _R] = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # there is no home, or numba found no folder that it can write to
        compiled = njit(error_model="numpy")(function)
    finally:
        config.CACHE_DIR = chosen
    return compiled


def inner(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """For functions that only compiled ones call."""
    compiled: Callable[_P, _R] = njit(error_model="numpy")(function)
    return compiled
