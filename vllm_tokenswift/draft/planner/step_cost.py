"""What a step costs by the nodes that it verifies: the cost model, for a batch, remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.draft.planner.cost_model import CostModel

# How often the host's time for drafting counts against beginning with it, where steps are launched
# before their samples are read: in the step that drafts, in the one that finds nothing more, and
# as often again because what is seen may be over when drafting begins.
_TIMES_TO_BEGIN = 4.0
# Curves kept of steps; a batch of changing size, or whose texts grow, needs a few hundred.
_MAX_CURVES = 1024
# Tokens of a request's prefix for which steps have one curve.
_CURVE_TOKENS = 64


class StepCost:
    """Times of steps in milliseconds.

    Args:
        model: of the machine.
        budget: tokens of partial KV that a self-draft pass reads (``|B|``).
        shapes_of: for a batch of so many requests, the shapes that its steps with trees are
            padded to: rows of each request and of the batch, ascending; none where steps are not
            padded.
    """

    def __init__(
        self,
        model: CostModel,
        budget: int,
        shapes_of: Callable[[int], Sequence[tuple[int, int]]],
    ) -> None:
        self.model = model
        self._budget = budget
        self._shapes_of = shapes_of
        self._padded: dict[int, tuple[Ints, Floats, Floats]] = {}
        self._curves: dict[tuple[float, ...], tuple[Floats, Floats]] = {}

    def host_ms(self, num_requests: int, begins: bool) -> float:
        """The host's time that counts against drafts.

        Args:
            num_requests: that are drafted for.
            begins: whether drafting only begins (:meth:`Planner.would_draft`).
        """
        return (_TIMES_TO_BEGIN if begins else 1.0) * self.model.host_drafting_ms(num_requests)

    def curve(
        self,
        num_plain: int,
        most_nodes: int,
        drafting_ms: float,
        context_tokens: int,
        num_requests: int,
    ) -> tuple[Floats, Floats]:
        """A step by its number of nodes.

        Args:
            num_plain: its query tokens without drafts.
            most_nodes: that the curve goes to.
            drafting_ms: of the host, for any nodes at all.
            context_tokens: of all prefixes.
            num_requests: that are drafted for.

        Returns:
            The step's ms but for what prefixes cost a plain decode, and the least that any
            further node adds; both float64 ``[most_nodes + 1]``.
        """
        tokens = _CURVE_TOKENS * num_requests
        context_tokens = (context_tokens + tokens // 2) // tokens * tokens
        key = (num_plain, most_nodes, drafting_ms, context_tokens, num_requests)
        if key not in self._curves:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            curve = self.model.step_curve_ms(
                num_plain, most_nodes, drafting_ms, context_tokens, num_requests
            )
            curve -= self.model.context_ms(context_tokens)
            steps = np.diff(curve, append=np.inf)
            cheapest = np.minimum.accumulate(steps[::-1])[::-1]
            self._curves[key] = (curve, cheapest.copy())
        return self._curves[key]

    def padded_steps(self, num_requests: int) -> tuple[Ints, Floats, Floats]:
        """Steps by their width. One request's are in the curve.

        Args:
            num_requests: of the batch.

        Returns:
            Rows of each request, 1 at first, int32; what a step of that many takes, and what
            each token of prefix adds to it besides what it adds to one row, float64.
        """
        found = self._padded.get(num_requests)
        if found is None:
            shapes = [(1, num_requests)]
            if num_requests > 1:
                shapes += self._shapes_of(num_requests)
            widths, rows = zip(*shapes, strict=True)
            ms = np.array([self.model.verify_ms(number) for number in rows])
            token_ms = np.array([self.model.context_ms(1, width) for width in widths])
            found = np.array(widths, np.int32), ms, token_ms - token_ms[0]
            self._padded[num_requests] = found
        return found

    def passes_ms(self, context_lens: Sequence[int], passes: Sequence[int]) -> float:
        """Draft passes of a step.

        Args:
            context_lens: ``[requests]``, tokens of their prefixes.
            passes: ``[requests]``, how many in a row each has.
        """
        total_ms = 0.0
        for depth in range(max(passes, default=0)):
            together = [n for n, count in zip(context_lens, passes, strict=True) if count > depth]
            kv_tokens = sum(min(self._budget, num_tokens) for num_tokens in together)
            total_ms += self.model.draft_pass_ms(kv_tokens, len(together))
        return total_ms
