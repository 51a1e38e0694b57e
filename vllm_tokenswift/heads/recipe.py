"""The training recipe: one frozen dataclass, the paper's numbers as defaults.

Source of the defaults: the paper's appendix "Training Details" (AdamW with betas
(0.9, 0.999), weight decay 0.1, 50 warm-up steps, cosine, 200 steps, learning rate 5e-3,
3 sequences on each GPU, 10 accumulation steps, the first 8K tokens of each text).
``max_grad_norm`` is the default of the trainer the authors used.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_tokenswift.heads.model import HeadForm
from vllm_tokenswift.heads.target import TargetShape

LEARNING_RATE = 5e-3
LEARNING_RATE_14B = 1e-3
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class TrainingRecipe:
    """How heads are trained.

    Args:
        form: ``released`` (the authors', default), ``linear`` (the paper's text), or
            ``sequential`` (ours; ``heads/model.py``), of which ``conditioned`` is the old name.
        width: of the sequential form's hidden layer; 0: twice the hidden size.
        vocabulary: of the sequential form: how many of the training text's most frequent
            tokens it can propose; 0: all.
        num_heads: length of the chain, at least 1 (the paper's gamma).
        learning_rate: peak; None is the paper's 5e-3, or 1e-3 for a target of Qwen2.5-14B's
            shape.
        num_steps: steps of the optimizer.
        warmup_steps: steps in which the learning rate rises.
        beta1: AdamW's first beta, from 0 to below 1.
        beta2: AdamW's second beta, from 0 to below 1.
        weight_decay: AdamW's, of the linear layers.
        max_grad_norm: gradients are clipped to this norm.
        batch_size: sequences on each GPU for each forward pass.
        grad_accumulation: forward passes for each step of the optimizer.
        seq_tokens: the most tokens of one sequence, at least ``num_heads + 2``.
        loss_chunk: rows (positions) whose logits exist at one time, on each GPU.
        held_out: share of the sequences kept for the accuracy at the end, 0 to 0.5.
        save_every: steps between checkpoints of the training; what an interruption may cost.
        seed: of the order of the data.
        dtype: of the frozen target; the heads' weights are float32 while they learn.
        device: a torch device, or ``auto`` (a GPU where there is one).

    Raises:
        ValueError: names the number that will not do, and what is allowed.
    """

    form: HeadForm = HeadForm.RELEASED
    width: int = 0
    vocabulary: int = 0
    num_heads: int = 3
    learning_rate: float | None = None
    num_steps: int = 200
    warmup_steps: int = 50
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    batch_size: int = 3
    grad_accumulation: int = 10
    seq_tokens: int = 8192
    loss_chunk: int = 512
    held_out: float = 0.05
    save_every: int = 25
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "auto"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "form", HeadForm(self.form))
        except ValueError:
            forms = ", ".join(form.value for form in HeadForm)
            raise ValueError(f"form is {self.form!r}; it must be one of {forms}") from None
        for name in ("width", "vocabulary"):
            given = getattr(self, name)
            if self.form is HeadForm.SEQUENTIAL:
                self._check(name, given >= 0, "at least 0")
            else:
                self._check(name, given == 0, f"0 where form is {self.form.value}")
        whole = ("num_heads", "num_steps", "batch_size", "grad_accumulation", "loss_chunk")
        for name in (*whole, "save_every"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("warmup_steps", self.warmup_steps >= 0, "at least 0")
        shortest = self.num_heads + 2
        self._check(
            "seq_tokens", self.seq_tokens >= shortest, f"at least num_heads + 2 = {shortest}"
        )
        self._check("held_out", 0 <= self.held_out <= 0.5, "from 0 to 0.5")
        rate = self.learning_rate
        self._check("learning_rate", rate is None or rate > 0, "above 0")
        self._check("beta1", 0 <= self.beta1 < 1, "from 0 to below 1")
        self._check("beta2", 0 <= self.beta2 < 1, "from 0 to below 1")
        self._check("weight_decay", self.weight_decay >= 0, "at least 0")
        self._check("max_grad_norm", self.max_grad_norm > 0, "above 0")
        self._check("dtype", self.dtype in _DTYPES, f"one of {', '.join(_DTYPES)}")

    def _check(self, name: str, is_allowed: bool, allowed: str) -> None:
        if not is_allowed:
            raise ValueError(f"{name} is {getattr(self, name)}; it must be {allowed}")

    def peak_learning_rate(self, target: TargetShape) -> float:
        """The learning rate after warming up, the paper's for this target where none is given."""
        if self.learning_rate is not None:
            return self.learning_rate
        is_14b = target.hidden_size == 5120 and target.num_hidden_layers == 48
        return LEARNING_RATE_14B if is_14b else LEARNING_RATE

    def to_dict(self) -> dict[str, Any]:
        """The recipe as records have it, the form by its name in files."""
        return asdict(self) | {"form": self.form.name_in_files}


def portable_name(model_or_data: str) -> str:
    """A model's or a data set's name for a record: of a local path, the last part."""
    return Path(model_or_data).resolve().name if Path(model_or_data).exists() else model_or_data
