"""Train self-drafting heads for a frozen target.

Only the heads learn. For each batch the target runs once; every head then learns from
the same hidden states, its loss taken through the target's LM head in chunks
(:mod:`vllm_tokenswift.heads.loss`). Memory is the target, one batch of hidden states, and
``loss_chunk x vocabulary`` logits.

Whatever a step does follows from the recipe, the data and the step's number, so that a
training that was killed and resumed ends with the same weights as one that was not.
While it runs, its state stands in a folder ``OUT.training``; ``OUT`` itself appears when
all is done, whole.
"""

from __future__ import annotations

import math
import platform
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from vllm_tokenswift.heads import checkpoint, self_distill
from vllm_tokenswift.heads.data import (
    IGNORED,
    Sequence,
    count_labels,
    frequent_tokens,
    make_batch,
    order,
    read_sequences,
    split_held_out,
)
from vllm_tokenswift.heads.distributed import Ranks, joined
from vllm_tokenswift.heads.files import new_folder, save_state_whole
from vllm_tokenswift.heads.frozen_target import FrozenTarget, target_shape
from vllm_tokenswift.heads.loss import TOP, chunked_cross_entropy
from vllm_tokenswift.heads.model import DraftHeads, HeadForm
from vllm_tokenswift.heads.plot import plot_losses
from vllm_tokenswift.heads.recipe import TrainingRecipe, portable_name
from vllm_tokenswift.heads.self_distill import SelfDistillation
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import write_own

# Norms that begin as the target's last one.
_NORMS_OF_TARGET = {
    HeadForm.RELEASED: ("input_layernorm.weight", "post_layernorm.weight"),
    HeadForm.SEQUENTIAL: ("post_layernorm.weight",),
}
STATE_NAME = "state.pt"
PLOT_NAME = "loss.png"


def train_heads(
    model: str, data: str | Path | SelfDistillation, out: str | Path, recipe: TrainingRecipe
) -> checkpoint.HeadsInfo:
    """Train heads for ``model`` on the texts in ``data`` and write them to ``out``.

    model: a folder or hub repository that ``transformers`` loads.
    data: texts (see :func:`vllm_tokenswift.heads.data.read_sequences`), or how the target
        is to write them itself; they then stand in the folder ``OUT.text``.
    out: a new folder (our own layout, with the record of the run and a plot of the loss).
        An interrupted run of the same recipe, data and target is taken up again.

    Raises ValueError in a sentence, before anything is written, where the recipe, the
    data or the target will not do.
    """
    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists already; name a new folder or remove it first")
    shape = target_shape(model)
    with joined(recipe.device) as ranks:
        if isinstance(data, SelfDistillation):
            settings, data = data, out.with_name(f"{out.name}.text")
            if ranks.is_first:
                self_distill.run_apart(data, settings)
            ranks.barrier()
        learned, held_out = _read(model, Path(data), recipe, shape, ranks.world_size)
        run = _Run(model, str(data), recipe, shape, ranks, learned, held_out)
        run.go(out)
        ranks.barrier()
    return checkpoint.inspect_heads(out)


def _read(
    model: str, data: Path, recipe: TrainingRecipe, shape: TargetShape, world_size: int
) -> tuple[list[Sequence], list[Sequence]]:
    per_step = recipe.batch_size * recipe.grad_accumulation * world_size
    sequences = read_sequences(
        data,
        AutoTokenizer.from_pretrained(model),
        seq_tokens=recipe.seq_tokens,
        num_heads=recipe.num_heads,
        vocab_size=shape.vocab_size,
        limit=math.ceil(recipe.num_steps * per_step / (1 - recipe.held_out)) + 1,
    )
    return split_held_out(sequences, recipe.held_out, recipe.seed)


def learning_rate(step: int, peak: float, recipe: TrainingRecipe) -> float:
    """Of a step counted from 0: a linear warm-up, then half a cosine towards 0."""
    if step < recipe.warmup_steps:
        return peak * (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.num_steps - recipe.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


@dataclass
class _Sums:
    """Loss and accuracy summed over rows: float64 ``[num_heads]``, hits ``[num_heads, TOP]``.

    rows: those with a label. learned: those whose label the heads can propose, over which
    the loss is taken.
    """

    loss: Tensor
    hits: Tensor
    rows: Tensor
    learned: Tensor

    @classmethod
    def zeros(cls, num_heads: int, device: torch.device) -> _Sums:
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(
            torch.zeros(num_heads, **options),
            torch.zeros(num_heads, TOP, **options),
            torch.zeros(num_heads, **options),
            torch.zeros(num_heads, **options),
        )

    def means(self) -> tuple[list[float], list[list[float]]]:
        """Mean loss of each head (nats), and its top-1..TOP accuracy (0 to 1)."""
        loss = self.loss / self.learned.clamp(min=1)
        return loss.tolist(), (self.hits / self.rows.clamp(min=1)[:, None]).tolist()


class _Run:
    """One training: what is fixed (target, data, recipe) and what changes (``state``)."""

    def __init__(
        self,
        model: str,
        data: str,
        recipe: TrainingRecipe,
        shape: TargetShape,
        ranks: Ranks,
        learned: list[Sequence],
        held_out: list[Sequence],
    ) -> None:
        self.model, self.data, self.recipe, self.shape = model, data, recipe, shape
        self.ranks, self.learned, self.held_out = ranks, learned, held_out
        self.peak = recipe.peak_learning_rate(shape)
        self.per_step = recipe.batch_size * recipe.grad_accumulation * ranks.world_size
        self.target = FrozenTarget(model, recipe.dtype, ranks.device)
        self.heads = self._new_heads()
        self.lm_head = self.target.lm_head
        self.lm_rows: Tensor | None = None  # [vocab]: each token's row in it, or IGNORED
        if (vocabulary := self.heads.vocabulary) is not None:
            self.lm_head = self.lm_head[vocabulary]
            self.lm_rows = torch.full((shape.vocab_size,), IGNORED, device=ranks.device)
            self.lm_rows[vocabulary] = torch.arange(len(vocabulary), device=ranks.device)
        matrices = [p for p in self.heads.parameters() if p.ndim == 2]
        norms = [p for p in self.heads.parameters() if p.ndim == 1]
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": recipe.weight_decay}]
        if norms:
            # Decay would pull a norm's weights away from 1, which means nothing.
            groups.append({"params": norms, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, betas=(recipe.beta1, recipe.beta2))
        self.step = 0
        self.seconds = 0.0
        self.losses: list[list[float]] = []  # [step][head]
        self.top1: list[list[float]] = []  # [step][head]

    def _new_heads(self) -> DraftHeads:
        recipe, shape = self.recipe, self.shape
        heads = DraftHeads(
            recipe.form,
            recipe.num_heads,
            shape.hidden_size,
            shape.rms_norm_eps,
            recipe.width,
            frequent_tokens(self.learned, recipe.vocabulary, shape.vocab_size),
        )
        if recipe.form is not HeadForm.LINEAR:
            # So that every head starts as the target's own next-token guess.
            for name, parameter in heads.named_parameters():
                if name.endswith(_NORMS_OF_TARGET[recipe.form]):
                    parameter.data.copy_(self.target.final_norm)
        return heads.to(self.ranks.device)

    def go(self, out: Path) -> None:
        state_path = out.with_name(f"{out.name}.training") / STATE_NAME
        self._resume(state_path)
        self.ranks.barrier()
        started = time.monotonic() - self.seconds
        with tqdm(
            total=self.recipe.num_steps,
            initial=self.step,
            desc="training heads",
            unit="step",
            disable=not self.ranks.is_first,
        ) as bar:
            while self.step < self.recipe.num_steps:
                bar.set_postfix_str(self._learn())
                bar.update()
                self.seconds = time.monotonic() - started
                if self.step % self.recipe.save_every == 0 and self.ranks.is_first:
                    state_path.parent.mkdir(parents=True, exist_ok=True)
                    save_state_whole(state_path, self._state())
        accuracy = self._held_out_accuracy()
        if self.ranks.is_first:
            with new_folder(out) as folder:
                plot_losses(self.losses, folder / PLOT_NAME)
                write_own(
                    self.heads.to(getattr(torch, self.recipe.dtype)),
                    folder,
                    target_name=portable_name(self.model),
                    target=self.shape,
                    training=self._record(accuracy),
                )
            shutil.rmtree(state_path.parent, ignore_errors=True)

    def _learn(self) -> str:
        """One step of the optimizer; returns what the progress bar says."""
        recipe, ranks = self.recipe, self.ranks
        first = self.step * self.per_step
        numbers = order(len(self.learned), recipe.seed, first, self.per_step)
        chosen = [self.learned[number] for number in numbers]
        labels = count_labels(chosen, recipe.num_heads)  # of all ranks together
        sums = _Sums.zeros(recipe.num_heads, ranks.device)
        self.optimizer.zero_grad(set_to_none=False)
        for index in range(recipe.grad_accumulation):
            start = (index * ranks.world_size + ranks.rank) * recipe.batch_size
            self._ask(chosen[start : start + recipe.batch_size], sums, labels)
        parameters = list(self.heads.parameters())
        ranks.sum(*(p.grad for p in parameters if p.grad is not None))
        ranks.sum(sums.loss, sums.hits, sums.rows, sums.learned)
        torch.nn.utils.clip_grad_norm_(parameters, recipe.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.peak, recipe)
        self.optimizer.step()
        self.step += 1
        loss, accuracy = sums.means()
        self.losses.append(loss)
        self.top1.append([top[0] for top in accuracy])
        return "  ".join(
            f"head {head}: loss {loss[head]:.3f}, top-1..{TOP} "
            + "/".join(f"{hit:.2f}" for hit in accuracy[head])
            for head in range(recipe.num_heads)
        )

    def _ask(self, chosen: list[Sequence], sums: _Sums, labels: list[int] | None) -> None:
        """Run target and heads over one batch; add to ``sums`` and, where the labels of the
        whole step are given, to the heads' gradients."""
        batch = make_batch(chosen, self.recipe.num_heads)
        device = self.ranks.device
        states = self.target.hidden(torch.from_numpy(batch.token_ids).to(device), self.heads.reads)
        positions = torch.from_numpy(batch.positions).to(device)
        rows = states.flatten(0, 1)[positions].float()  # [rows, hidden]
        embedded = None
        if self.heads.is_sequential:
            before = torch.from_numpy(batch.tokens_before()).to(device)  # [heads, rows]
            embedded = [self.target.embeddings[tokens].float() for tokens in before]
        reads, grads = self.heads(rows, embedded), []
        for head, read in enumerate(reads):
            wanted = torch.from_numpy(batch.labels[head]).to(device)
            sums.rows[head] += (wanted != IGNORED).sum()
            # Tokens that the heads cannot propose are misses, and teach nothing.
            wanted = self._within_vocabulary(wanted)
            asked = (wanted != IGNORED).nonzero().squeeze(1)  # rows of this head
            result = chunked_cross_entropy(
                read.detach()[asked],
                wanted[asked],
                self.lm_head,
                chunk=self.recipe.loss_chunk,
                scale=None if labels is None else 1 / max(1, labels[head]),
            )
            sums.loss[head] += result.loss
            sums.hits[head] += result.hits
            sums.learned[head] += result.rows
            if result.grad is not None:
                grads.append(torch.zeros_like(read).index_copy_(0, asked, result.grad))
        if grads:
            torch.autograd.backward(reads, grads)

    def _within_vocabulary(self, labels: Tensor) -> Tensor:
        """Labels as rows of the LM head that the heads use; IGNORED where there is none."""
        if self.lm_rows is None:
            return labels
        return torch.where(labels == IGNORED, labels, self.lm_rows[labels.clamp(min=0)])

    @torch.no_grad()
    def _held_out_accuracy(self) -> _Sums:
        """Over the held-out sequences, by the heads as they will be written."""
        rounded = self.heads.to(getattr(torch, self.recipe.dtype)).float()
        self.heads = rounded
        sums = _Sums.zeros(self.recipe.num_heads, self.ranks.device)
        mine = self.held_out[self.ranks.rank :: self.ranks.world_size]
        for start in range(0, len(mine), self.recipe.batch_size):
            self._ask(mine[start : start + self.recipe.batch_size], sums, labels=None)
        self.ranks.sum(sums.loss, sums.hits, sums.rows, sums.learned)
        return sums

    def _identity(self) -> dict[str, Any]:
        """What a training and its continuation must have in common."""
        return self.recipe.to_dict() | {
            "target": self.shape.fingerprint(),
            "world_size": self.ranks.world_size,
            "sequences": len(self.learned),
            "tokens": sum(len(s.token_ids) for s in self.learned),
        }

    def _state(self) -> dict[str, Any]:
        return {
            "identity": self._identity(),
            "heads": self.heads.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "top1": self.top1,
        }

    def _resume(self, path: Path) -> None:
        if not path.exists():
            return
        state = torch.load(path, map_location=self.ranks.device, weights_only=True)
        ours, theirs = self._identity(), state["identity"]
        if differing := [name for name in ours if ours[name] != theirs.get(name)]:
            raise ValueError(
                f"{path.parent} holds an interrupted training with another "
                + ", ".join(f"{name} ({theirs.get(name)}, now {ours[name]})" for name in differing)
                + "; start it as it was, or remove that folder to begin anew"
            )
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.losses, self.top1 = state["losses"], state["top1"]

    def _record(self, held_out: _Sums) -> dict[str, Any]:
        """The record of the run: recipe, data, machine, curves, held-out accuracy."""
        loss, accuracy = held_out.means()
        device = self.ranks.device
        is_gpu = device.type == "cuda"
        return {
            "recipe": self.recipe.to_dict() | {"learning_rate": self.peak},
            "data": {
                "name": portable_name(self.data),
                "sequences": len(self.learned),
                "tokens": sum(len(s.token_ids) for s in self.learned),
                "held_out_sequences": len(self.held_out),
                "held_out_tokens": sum(len(s.token_ids) for s in self.held_out),
            },
            "hardware": torch.cuda.get_device_name(device) if is_gpu else platform.machine(),
            "processes": self.ranks.world_size,
            "seconds": round(self.seconds, 1),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "held_out": [
                {
                    "head": head,
                    "predicts_tokens_ahead": head + 2,
                    "labels": int(held_out.rows[head]),
                    "loss_nats": round(loss[head], 4),
                    **{f"top{n + 1}": round(hit, 4) for n, hit in enumerate(accuracy[head])},
                }
                for head in range(self.recipe.num_heads)
                if self.held_out
            ],
            "loss_nats": [[round(value, 4) for value in step] for step in self.losses],
            "top1": [[round(value, 4) for value in step] for step in self.top1],
        }
