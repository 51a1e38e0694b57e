"""Self-distillation: the target writes its own training text with vLLM.

Runs as a process of its own (``python -m vllm_tokenswift.heads.self_distill``), so that
vLLM's memory is free again before the training starts. Text is written in rounds, one
file each, and a file appears only whole: an interrupted run goes on with the next round.
A round depends on its number and the settings only, so it comes out the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_tokenswift.heads.files import read_json, write_text_whole
from vllm_tokenswift.heads.prompts import built_in_prompts

if TYPE_CHECKING:
    from vllm.inputs import PromptType

SETTINGS_NAME = "settings.json"


@dataclass(frozen=True)
class SelfDistillation:
    """How the target writes its training text.

    num_tokens: tokens to write, prompts not counted; the last round may exceed it.
    sampling: keyword arguments of vLLM's ``SamplingParams``, one dict for each recipe;
            requests take the recipes in turn. They should be the recipes of later use; the
        windowed penalty and eta-sampling in ``extra_args`` work.
    text_tokens: the most tokens of one text.
    texts_per_round: the most requests that vLLM runs together and that are written together.
    prompts: a text file with one prompt on each line, or None for the built-in prompts.
    engine: further keyword arguments of vLLM's ``LLM`` (``tensor_parallel_size``, ...).
    """

    model: str
    num_tokens: int
    sampling: list[dict[str, Any]]
    text_tokens: int = 2048
    texts_per_round: int = 256
    prompts: str | None = None
    seed: int = 0
    dtype: str = "bfloat16"
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_tokens", "text_tokens", "texts_per_round"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.sampling:
            raise ValueError("sampling holds no recipe: self-distillation needs one or more")


def _prompts(settings: SelfDistillation) -> list[str]:
    if settings.prompts is None:
        return built_in_prompts(settings.seed)
    lines = Path(settings.prompts).read_text(encoding="utf-8").splitlines()
    if not (prompts := [line for line in lines if line.strip()]):
        raise ValueError(f"{settings.prompts} holds no prompt: write one on each line")
    return prompts


def _start(folder: Path, settings: SelfDistillation) -> None:
    """Make the folder, or make sure that it was begun with the same settings."""
    path = folder / SETTINGS_NAME
    if path.exists() and read_json(path) != asdict(settings):
        raise ValueError(
            f"{folder} holds text that was written with other settings; "
            "remove it, or give the settings it was begun with"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_text_whole(path, json.dumps(asdict(settings), indent=2))


def _count(file: Path) -> int:
    """Tokens that the model wrote in one round's file."""
    texts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sum(len(text["token_ids"]) - text["num_prompt_tokens"] for text in texts)


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """A prompt as the model's users send it: through its chat template if it has one."""
    ids: list[int]
    if tokenizer.chat_template is None:
        ids = tokenizer.encode(prompt)
    else:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids


def _processors(sampling: list[dict[str, Any]]) -> list[str]:
    """What plain vLLM needs to honour TokenSwift's own sampling parameters."""
    names = {name for recipe in sampling for name in recipe.get("extra_args", {})}
    processors = {"penalty_theta": "WindowedPenalty", "eta_epsilon": "EtaSampling"}
    module = "vllm_tokenswift.sampling.processors"
    return [f"{module}:{kind}" for name, kind in processors.items() if name in names]


def write_texts(folder: Path, settings: SelfDistillation) -> None:
    """Write rounds of text into ``folder`` until ``num_tokens`` tokens stand there.

    Each line of a round's file is a JSON object: ``token_ids`` (prompt and text)
    and ``num_prompt_tokens``.
    """
    prompts = _prompts(settings)
    _start(folder, settings)
    written, round_number = 0, 0
    while (file := folder / f"round-{round_number:05}.jsonl").exists():
        written, round_number = written + _count(file), round_number + 1
    if written >= settings.num_tokens:
        return

    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    llm = LLM(
        settings.model,
        dtype=cast(Literal["bfloat16", "float16", "float32"], settings.dtype),
        seed=settings.seed,
        **{"logits_processors": _processors(settings.sampling)} | settings.engine,
    )
    while written < settings.num_tokens:
        first = round_number * settings.texts_per_round
        missing = -(-(settings.num_tokens - written) // settings.text_tokens)
        numbers = range(first, first + min(missing, settings.texts_per_round))
        inputs: list[PromptType] = [
            {"prompt_token_ids": _prompt_ids(tokenizer, prompts[number % len(prompts)])}
            for number in numbers
        ]
        params = [
            SamplingParams(
                **{"max_tokens": settings.text_tokens, "seed": settings.seed + number}
                | settings.sampling[number % len(settings.sampling)]
            )
            for number in numbers
        ]
        outputs = llm.generate(inputs, params)
        lines = []
        for output in outputs:
            prompt_ids = list(output.prompt_token_ids or [])
            text_ids = list(output.outputs[0].token_ids)
            written += len(text_ids)
            record = {
                "num_prompt_tokens": len(prompt_ids),
                "token_ids": prompt_ids + text_ids,
            }
            lines.append(json.dumps(record))
        write_text_whole(folder / f"round-{round_number:05}.jsonl", "\n".join(lines) + "\n")
        round_number += 1


def run_apart(folder: Path, settings: SelfDistillation) -> None:
    """:func:`write_texts` in a process of its own, outside any group of ranks.

    Raises RuntimeError where it failed; its own output says why.
    """
    _start(folder, settings)
    group = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in group and not name.startswith("TORCHELASTIC_")
    }
    module = "vllm_tokenswift.heads.self_distill"
    command = [sys.executable, "-m", module, str(folder), json.dumps(asdict(settings))]
    if code := subprocess.run(command, env=environment, check=False).returncode:
        raise RuntimeError(
            f"{settings.model} could not write its training text with vLLM (exit code {code}); "
            "what vLLM printed above says why"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads, help="SelfDistillation as JSON")
    arguments = parser.parse_args()
    write_texts(arguments.folder, SelfDistillation(**arguments.settings))
