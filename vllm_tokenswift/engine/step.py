"""One step of the runner: what one of vLLM's hooks finds out and a later one needs.

vLLM calls the hooks in a fixed order, with its own code between them. A step notes how far it has
come, and refuses what is not its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from vllm_tokenswift.engine.step_trees import NO_TREES, StepTrees


class Stage(IntEnum):
    """How far a step has come, and by which hook."""

    SCHEDULED = 0
    """``execute_model``: the scheduler asks for it."""
    LAID_OUT = 1
    """``_prepare_inputs``: it is known which query row is which node."""
    LAUNCHED = 2
    """``_model_forward``: the verify pass is under way."""
    VERIFIED = 3
    """``_sample``: what is accepted is committed."""
    DRAFTED = 4
    """``_sample``, or else ``propose_draft_token_ids``: the next step's trees are made."""
    OVER = 5
    """``propose_draft_token_ids``: vLLM has the drafts."""


@dataclass(frozen=True)
class LaunchedPass:
    """A verify pass that is under way, whether or not its step has been scheduled.

    Attributes:
        trees: what it verifies.
        inputs: what ``_prepare_inputs`` returns for the step.
        metadata: what ``_build_attention_metadata`` returns.
        output: what ``_model_forward`` returns.
        dead_nodes: by request, nodes that attention had no room for.
    """

    trees: StepTrees
    inputs: Any
    metadata: Any
    output: Any
    dead_nodes: Mapping[str, frozenset[int]] = field(default_factory=dict)


class Step:
    """A step from its schedule to the drafts of the next one.

    Attributes:
        stage: how far it has come. vLLM may give a step up at any stage.
        placeholders: requests whose drafts are vLLM's padding, of which none may be accepted.
        trees: what it verifies, from ``LAID_OUT`` on.
        dead_nodes: by request, nodes that attention had no room for, from ``LAUNCHED`` on.
        prelaunched: its pass, where that was launched ahead of the schedule; to ``LAUNCHED``.
        hidden_states: ``[query rows, hidden]``, in the form that heads read; to ``OVER``.
    """

    def __init__(self, placeholders: frozenset[str] = frozenset()) -> None:
        self.stage = Stage.SCHEDULED
        self.placeholders = placeholders
        self.trees: StepTrees = NO_TREES
        self.dead_nodes: Mapping[str, frozenset[int]] = {}
        self.prelaunched: LaunchedPass | None = None
        self.hidden_states: torch.Tensor | None = None
        self._drafts: list[list[int]] | None = None

    @classmethod
    def over(cls) -> Step:
        """The one before the first: nothing is under way."""
        step = cls()
        step.stage = Stage.OVER
        return step

    def lay_out(self, trees: StepTrees) -> None:
        """Its query rows are those of these trees."""
        self._go_on(Stage.SCHEDULED, Stage.LAID_OUT)
        self.trees = trees

    def take_over(self, prelaunched: LaunchedPass) -> None:
        """Its pass is under way already: it is laid out as that was."""
        self.lay_out(prelaunched.trees)
        self.dead_nodes = prelaunched.dead_nodes
        self.prelaunched = prelaunched

    def launch(self) -> LaunchedPass | None:
        """Its pass is run now; returns the one that runs already, if there is one."""
        self._go_on(Stage.LAID_OUT, Stage.LAUNCHED)
        prelaunched, self.prelaunched = self.prelaunched, None
        return prelaunched

    def verify(self) -> None:
        """What it accepted has been committed."""
        self._go_on(Stage.LAUNCHED, Stage.VERIFIED)

    def draft(self, drafts: list[list[int]]) -> None:
        """Drafts of the next step, by batch row."""
        self._go_on(Stage.VERIFIED, Stage.DRAFTED)
        self._drafts = drafts

    def hand_out(self) -> list[list[int]]:
        """The drafts, which end the step."""
        self._go_on(Stage.DRAFTED, Stage.OVER)
        drafts, self._drafts = self._drafts, None
        self.hidden_states = None
        assert drafts is not None
        return drafts

    def _go_on(self, from_: Stage, to: Stage) -> None:
        assert self.stage is from_, f"a step that is {self.stage.name} cannot be {to.name} now"
        self.stage = to
