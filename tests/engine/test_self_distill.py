"""Heads for a model with one command: it writes its own text with vLLM, and the heads learn it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from vllm_tokenswift.heads.checkpoint import load_heads


def train(model: Path, out: Path, num_tokens: int) -> str:
    command = [sys.executable, "-m", "vllm_tokenswift.cli", "train", "--model", model, "--out", out]
    command += ["--self-distill", num_tokens, "--text-tokens", 40, "--texts-per-round", 4]
    command += ["--sampling", '{"temperature": 1.0, "min_p": 0.1}']
    command += ["--engine", '{"enforce_eager": true, "max_model_len": 256, "max_num_seqs": 4}']
    command += ["--form", "sequential", "--vocabulary", 64, "--num-steps", 2]
    command += ["--batch-size", 2, "--grad-accumulation", 1, "--seq-tokens", 64]
    command += ["--held-out", 0.2, "--dtype", "float32"]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def test_a_model_writes_its_own_text_and_gets_heads(demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    said = train(demo_model, out, 200)
    assert "held out" in said
    rounds = sorted((tmp_path / "heads.text").glob("round-*.jsonl"))
    texts = [json.loads(line) for file in rounds for line in file.read_text().splitlines()]
    written = [len(text["token_ids"]) - text["num_prompt_tokens"] for text in texts]
    # Five texts of 40 tokens are asked for, and more only where some end early.
    assert 200 <= sum(written) < 200 + 40
    assert max(written) == 40
    assert len({tuple(text["token_ids"]) for text in texts}) == len(texts)
    heads = load_heads(str(out), hidden_size=576, dtype=torch.float32, device="cpu")
    assert heads.vocabulary is not None
    assert len(heads.vocabulary) == 64
