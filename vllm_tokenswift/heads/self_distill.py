"""Self-distillation: the target writes its own training text with vLLM.

Runs as a process of its own (``python -m vllm_tokenswift.heads.self_distill``), so that
vLLM's memory is free again before the training starts. Text is written in rounds, one
file each, and a file appears only whole: an interrupted run goes on with the next round.
A round depends on its number and the settings only, so it comes out the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_tokenswift.heads.files import read_json, write_text_whole
from vllm_tokenswift.heads.prompts import built_in_prompts

SETTINGS_NAME = "settings.json"


@dataclass(frozen=True)
class SelfDistillation:
    """How the target writes its training text.

    num_tokens: tokens to write, prompts not counted; the last round may exceed it.
    sampling: keyword arguments of vLLM's ``SamplingParams``, one dict for each recipe;
        requests take the recipes in turn. They should be the recipes of later use.
    text_tokens: the most tokens of one text.
    texts_per_round: requests that vLLM runs together and that are written together.
    prompts: a text file with one prompt on each line, or None for the built-in prompts.
    engine: further keyword arguments of vLLM's ``LLM`` (``tensor_parallel_size``, ...).
    """

    model: str
    num_tokens: int
    sampling: list[dict[str, Any]]
    text_tokens: int = 2048
    texts_per_round: int = 64
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

    llm = LLM(settings.model, dtype=settings.dtype, seed=settings.seed, **settings.engine)
    tokenizer = llm.get_tokenizer()
    while written < settings.num_tokens:
        first = round_number * settings.texts_per_round
        numbers = range(first, first + settings.texts_per_round)
        chosen = [prompts[number % len(prompts)] for number in numbers]
        if tokenizer.chat_template is not None:
            chosen = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}],
                    tokenize=False,
                    add_generation_prompt=True,
                )
                for prompt in chosen
            ]
        inputs = [
            {"prompt_token_ids": tokenizer.encode(prompt, add_special_tokens=False)}
            for prompt in chosen
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", type=json.loads, help="SelfDistillation as JSON")
    arguments = parser.parse_args()
    write_texts(arguments.folder, SelfDistillation(**arguments.settings))
