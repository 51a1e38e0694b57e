"""What a pass costs on this machine: measured points, interpolated.

Built once at start-up on rank 0 and broadcast as JSON, so that every rank plans alike.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class CostModel:
    """Times in milliseconds.

    Attributes:
        verify_points: (tokens in the batch, ms of a target pass at negligible context), at
            least one. Linear between points, and beyond the last point at the slope of the last
            segment, never falling there. Between points they may fall: on a CPU some rows more
            can take less time, where its matrix products have another kernel.
        context_points: (query rows of a request, ms that each token of its prefix adds to a
            pass), or empty where prefixes cost nothing. More rows take no less.
        chain_ms: what each attention chain besides a request's main one adds. On the CPU every
            side branch of a tree is a chain; on a GPU the whole tree shares one read (0).
        chain_context_ms_per_token: the same per token of the prefix that it reads again.
        draft_points: (tokens of partial KV read by the batch, ms of a draft pass for one
            request), or empty where there is none; further requests add what they add to a
            verify pass.
        heads_ms: what a pass of free heads costs one request: the heads, and the LM head once
            more.
        heads_request_ms: each further request (0 where all share it).
        host_bound_ms: the least that a pass takes which is not one CUDA graph, because the host
            launches its attention; 0 where there are no such graphs.
        drafting_ms: what drafting from the text for one request costs the host while the device
            waits (``engine/profiling/host_time.py``); 0 where a step without drafts waits as
            long.
        drafting_request_ms: for each further one.

    Raises:
        ValueError: for values that no machine has.
    """

    verify_points: Points
    _: KW_ONLY
    context_points: Points = ()
    chain_ms: float = 0.0
    chain_context_ms_per_token: float = 0.0
    draft_points: Points = ()
    heads_ms: float = 0.0
    heads_request_ms: float = 0.0
    host_bound_ms: float = 0.0
    drafting_ms: float = 0.0
    drafting_request_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.verify_points:
            raise ValueError("verify_points is empty: a cost model needs at least one point")
        for name in ("verify_points", "draft_points"):
            points = getattr(self, name)
            if any(not (size >= 0 and ms > 0) for size, ms in points):
                raise ValueError(f"{name} must hold sizes >= 0 and times > 0, got {points}")
            object.__setattr__(self, name, _by_size(points))
        if any(not (rows >= 1 and ms >= 0) for rows, ms in self.context_points):
            raise ValueError(
                f"context_points must hold rows >= 1 and times >= 0, got {self.context_points}"
            )
        object.__setattr__(self, "draft_points", _monotone(self.draft_points))
        object.__setattr__(self, "context_points", _monotone(_by_size(self.context_points)))
        for name in (
            "chain_ms",
            "chain_context_ms_per_token",
            "heads_ms",
            "heads_request_ms",
            "host_bound_ms",
            "drafting_ms",
            "drafting_request_ms",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def verify_ms(self, num_tokens: int, context_tokens: int = 0, num_chains: int = 0) -> float:
        """A target pass.

        Args:
            num_tokens: query tokens, of one request where it has a context.
            context_tokens: length of its prefix.
            num_chains: attention chains besides its main one (their prefix costs: see
                :meth:`chain_cost_ms`).
        """
        return (
            _interpolate(self.verify_points, num_tokens)
            + self.context_ms(context_tokens, num_tokens)
            + self.chain_ms * num_chains
        )

    def tree_ms(self, num_nodes: int, side_chains: int, context_len: int) -> float:
        """A step that verifies one request's tree.

        Args:
            num_nodes: drafts of the tree.
            side_chains: its chains besides the main one.
            context_len: tokens of the prefix.
        """
        chains_ms = side_chains * self.chain_cost_ms(context_len)
        host_ms = self.drafting_ms if num_nodes else 0.0
        return self.verify_ms(1 + num_nodes, context_len) + chains_ms + host_ms

    def step_curve_ms(
        self,
        num_plain: int,
        most_nodes: int,
        drafting_ms: float = 0.0,
        context_tokens: int = 0,
        num_requests: int = 1,
    ) -> npt.NDArray[np.float64]:
        """A step by its number of draft nodes.

        Args:
            num_plain: its other query tokens.
            most_nodes: that the curve goes to.
            drafting_ms: of the host, for any nodes at all.
            context_tokens: prefix lengths of the requests, summed.
            num_requests: which the nodes are drafted for.

        Returns:
            float64 ``[most_nodes + 1]``.
        """
        curve = self.verify_curve_ms(num_plain, num_plain + most_nodes)
        curve[1:] += drafting_ms
        if context_tokens and self.context_points:
            rows = 1.0 + np.arange(most_nodes + 1) / num_requests
            curve += context_tokens * _interpolated(self.context_points, rows)
        return curve

    def host_drafting_ms(self, num_requests: int) -> float:
        """What it costs the host to draft from texts.

        Args:
            num_requests: whose texts, one at least.
        """
        return self.drafting_ms + self.drafting_request_ms * (num_requests - 1)

    def context_ms(self, context_tokens: int, num_rows: float = 1.0) -> float:
        """What prefixes add to a pass.

        Args:
            context_tokens: their tokens in all.
            num_rows: query rows of each request, on average.
        """
        if not self.context_points:
            return 0.0
        return context_tokens * _interpolate(self.context_points, num_rows)

    def verify_curve_ms(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Passes without context, by their tokens.

        Args:
            first: the fewest tokens.
            last: the most.

        Returns:
            float64 ``[last - first + 1]``.
        """
        return _interpolated(self.verify_points, np.arange(first, last + 1, dtype=np.float64))

    @property
    def chains_cost(self) -> bool:
        """Whether side branches cost time."""
        return self.chain_ms > 0 or self.chain_context_ms_per_token > 0

    def chain_cost_ms(self, context_len: int) -> float:
        """A side branch of a request.

        Args:
            context_len: tokens of its prefix.
        """
        return self.chain_ms + self.chain_context_ms_per_token * context_len

    def draft_pass_ms(self, kv_tokens: int, num_requests: int = 1) -> float:
        """A draft pass over one token of each request.

        Before it and behind it the device waits for the host about once more as long as for
        drafts of the text.

        Args:
            kv_tokens: of partial KV that it reads, of all requests.
            num_requests: that have the pass.

        Raises:
            ValueError: where no draft pass was measured.
        """
        if not self.draft_points:
            raise ValueError("draft_points is empty: no draft pass was measured")
        more_rows = self.rows_ms(1, num_requests - 1)
        host_ms = self.host_drafting_ms(num_requests)
        return _interpolate(self.draft_points, kv_tokens) + more_rows + host_ms

    def rows_ms(self, num_tokens: int, more: float) -> float:
        """What further rows add to a pass, at least nothing: where they would save time, it is not
        spent on what brings them.

        Args:
            num_tokens: of the pass.
            more: rows, on average.
        """
        points = self.verify_points
        return max(0.0, _interpolate(points, num_tokens + more) - _interpolate(points, num_tokens))

    def heads_pass_ms(self, num_requests: int) -> float:
        """A pass of free heads.

        Args:
            num_requests: that it is for, one at least.
        """
        return self.heads_ms + self.heads_request_ms * (num_requests - 1)

    def to_json(self) -> str:
        """As JSON; :meth:`from_json` reads it back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """A cost model from what :meth:`to_json` wrote.

        Args:
            text: its JSON.

        Raises:
            ValueError: where the text is not a cost model's.
        """
        fields = json.loads(text)
        try:
            for name in ("verify_points", "draft_points", "context_points"):
                fields[name] = tuple((float(size), float(ms)) for size, ms in fields[name])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost model: {error}") from error


def _by_size(points: Sequence[Sequence[float]]) -> Points:
    """Ascending; of a size that stands there twice the longest time."""
    return tuple(dict(sorted((float(size), float(ms)) for size, ms in points)).items())


def _monotone(points: Points) -> Points:
    """No time below one of a smaller size: reading more takes no less, but for noise."""
    slowest = accumulate((ms for _, ms in points), max)
    return tuple((size, ms) for (size, _), ms in zip(points, slowest, strict=True))


def _last_slope(points: Points) -> float:
    if len(points) < 2:
        return 0.0
    (size, ms), (last_size, last_ms) = points[-2:]
    return max(0.0, (last_ms - ms) / (last_size - size))


def _interpolate(points: Points, size: float) -> float:
    """Without numpy, whose calls take longer: the planner asks several times a step."""
    last_size, last_ms = points[-1]
    if size > last_size:
        return last_ms + _last_slope(points) * (size - last_size)
    above = bisect_left(points, (size,))
    upper_size, upper_ms = points[above]
    if above == 0 or upper_size == size:
        return upper_ms
    lower_size, lower_ms = points[above - 1]
    return lower_ms + (upper_ms - lower_ms) / (upper_size - lower_size) * (size - lower_size)


def _interpolated(points: Points, sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same of many sizes."""
    measured, times = zip(*points, strict=True)
    curve: npt.NDArray[np.float64] = np.interp(sizes, measured, times)
    curve += _last_slope(points) * np.maximum(sizes - measured[-1], 0.0)
    return curve
