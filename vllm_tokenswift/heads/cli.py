"""``vllm-tokenswift train``, ``inspect`` and ``convert``: heads from the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from vllm_tokenswift.heads.recipe import TrainingRecipe
from vllm_tokenswift.presets import PRESETS, sampling_recipe, training_recipe

_RECIPE_HELP = {
    "form": "released (norms around each linear layer, as the authors' checkpoints), linear, "
    "or sequential (Hydra; ours: each head also reads the token drafted before; conditioned is "
    "its old name)",
    "width": "of the sequential form's hidden layer; 0 is twice the hidden size",
    "vocabulary": "most frequent tokens that sequential heads can propose; 0 is all",
    "num_heads": "heads in the chain; head i learns the token 2 + i ahead",
    "learning_rate": "peak learning rate (default: 5e-3; 1e-3 for a 14B target)",
    "num_steps": "steps of the optimizer",
    "warmup_steps": "steps in which the learning rate rises",
    "beta1": "AdamW's first beta",
    "beta2": "AdamW's second beta",
    "weight_decay": "AdamW's weight decay of the linear layers",
    "max_grad_norm": "gradients are clipped to this norm",
    "batch_size": "sequences on each GPU in a forward pass",
    "grad_accumulation": "forward passes for each step",
    "seq_tokens": "the most tokens of a sequence",
    "loss_chunk": "positions whose logits exist at one time",
    "held_out": "share of the sequences kept for the accuracy at the end",
    "save_every": "steps between checkpoints of the training",
    "seed": "seed of the order of the data and of self-distillation",
    "dtype": "dtype of the frozen target: bfloat16, float16 or float32",
    "device": "torch device, or auto",
}


def add_parser(subparsers: Any) -> None:
    """Add the three commands; each sets ``run``, a function of the parsed arguments."""
    _add_train(subparsers)
    inspect = subparsers.add_parser("inspect", help="say what a checkpoint of heads is")
    inspect.add_argument("path", help="a folder, the name of bundled heads, or a hub repository")
    inspect.set_defaults(run=_inspect)
    convert = subparsers.add_parser(
        "convert",
        help="write heads in the authors' layout (target and heads in one folder), or back",
    )
    convert.add_argument("path", help="the heads to read, in any layout")
    convert.add_argument("--out", required=True, type=Path, help="a new folder")
    convert.add_argument(
        "--model",
        type=Path,
        help="folder of the target, to write both in one folder; without it the heads are "
        "written alone, in our own layout",
    )
    convert.add_argument(
        "--vocabulary",
        type=int,
        help="cut what sequential heads propose to so many of the most frequent tokens",
    )
    convert.set_defaults(run=_convert)


def _add_train(subparsers: Any) -> None:
    train = subparsers.add_parser(
        "train",
        help="train self-drafting heads for a model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Train self-drafting heads for a frozen model. Run it under torchrun or "
        "accelerate to use several GPUs. An interrupted run goes on from its last checkpoint "
        "when it is started again.",
    )
    train.add_argument("--model", required=True, help="the target: a folder or hub repository")
    source = train.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", help="text, JSON lines, Parquet, a folder of these, or a `datasets` folder"
    )
    source.add_argument(
        "--self-distill",
        type=int,
        metavar="N",
        help="let the target write N tokens of training text with vLLM (kept in OUT.text)",
    )
    train.add_argument("--out", required=True, type=Path, help="a new folder for the heads")
    train.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="the paper's numbers for a model: learning rate, steps, batch, sampling",
    )
    recipe = train.add_argument_group("recipe")
    for field in dataclasses.fields(TrainingRecipe):
        kind = float if field.name == "learning_rate" else type(field.default)
        recipe.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=str if field.name == "form" else kind,
            help=f"{_RECIPE_HELP[field.name]} (default: {field.default})",
            default=argparse.SUPPRESS,
        )
    distill = train.add_argument_group("self-distillation")
    distill.add_argument(
        "--sampling",
        type=_json_object,
        action="append",
        help='vLLM SamplingParams as JSON, such as \'{"temperature": 1, "min_p": 0.1}\'; given '
        "several times, texts take them in turn (default: the preset's, else temperature 1 "
        "and min-p 0.1)",
        default=argparse.SUPPRESS,
    )
    distill.add_argument("--prompts", help="text file with one prompt on each line")
    distill.add_argument("--text-tokens", type=int, default=2048, help="the most of one text")
    distill.add_argument(
        "--texts-per-round", type=int, default=256, help="the most texts written together"
    )
    distill.add_argument(
        "--engine", type=_json_object, default={}, help="further arguments of vLLM's LLM, as JSON"
    )
    train.set_defaults(run=_train)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _train(arguments: argparse.Namespace) -> None:
    from vllm_tokenswift.heads.self_distill import SelfDistillation
    from vllm_tokenswift.heads.train import train_heads

    given = vars(arguments)
    names = [field.name for field in dataclasses.fields(TrainingRecipe)]
    numbers = training_recipe(arguments.preset) if arguments.preset else {}
    recipe = TrainingRecipe(**numbers | {name: given[name] for name in names if name in given})
    data: str | SelfDistillation = arguments.data
    if arguments.self_distill is not None:
        usual = {"temperature": 1.0, "min_p": 0.1}
        usual = sampling_recipe(arguments.preset) if arguments.preset else usual
        data = SelfDistillation(
            model=arguments.model,
            num_tokens=arguments.self_distill,
            sampling=given.get("sampling", [usual]),
            text_tokens=arguments.text_tokens,
            texts_per_round=arguments.texts_per_round,
            prompts=arguments.prompts,
            seed=recipe.seed,
            dtype=recipe.dtype,
            engine=arguments.engine,
        )
    train_heads(arguments.model, data, arguments.out, recipe)
    print(describe(arguments.out))


def _inspect(arguments: argparse.Namespace) -> None:
    print(describe(arguments.path))


def _convert(arguments: argparse.Namespace) -> None:
    from vllm_tokenswift.heads.writing import convert_heads

    convert_heads(arguments.path, arguments.out, arguments.model, arguments.vocabulary)
    print(describe(arguments.out))


def describe(path: str | Path) -> str:
    """What ``inspect`` prints: the checkpoint's form, its target and how well it learned."""
    from vllm_tokenswift.heads.checkpoint import inspect_heads

    info = inspect_heads(path)
    target = "not recorded"
    if info.target is not None:
        shape = info.target
        target = (
            f"{info.target_name or 'unnamed'} ({shape.model_type}, {shape.num_hidden_layers} "
            f"layers, vocabulary {shape.vocab_size}, fingerprint {shape.fingerprint()})"
        )
    with_target = " with the target's weights" if info.has_target_weights else ""
    lines = [
        f"path         {info.path}",
        f"layout       {info.layout}{with_target}",
        f"form         {info.form.value}",
        f"heads        {info.num_heads}",
        f"hidden size  {info.hidden_size}",
        f"proposes     {info.vocabulary_size or 'all'} tokens of the vocabulary",
        f"dtype        {info.dtype}",
        f"target       {target}",
    ]
    if training := info.training:
        recipe, data = training["recipe"], training["data"]
        lines.append(
            f"trained      {recipe['num_steps']} steps on {data['tokens']} tokens of "
            f"{data['name']}, {training['seconds']:g} s on {training['hardware']}"
        )
        lines += [
            f"held out     head {head['head']} (token {head['predicts_tokens_ahead']} ahead): "
            f"top-1 {head['top1']:.3f}, top-2 {head['top2']:.3f}, top-3 {head['top3']:.3f}, "
            f"loss {head['loss_nats']:.3f} nats"
            for head in training["held_out"]
        ]
    return "\n".join(lines)
