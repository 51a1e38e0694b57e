"""Writes a record of every request that ends (:class:`~vllm_tokenswift.explain.record.Record`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.logger import init_logger

from vllm_tokenswift.draft.planner.planner import Planner
from vllm_tokenswift.engine.draft_request import Drafts
from vllm_tokenswift.explain.record import PROMPT, Iteration, Record
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import DraftTree

logger = init_logger(__name__)

_MAX_NAME_LENGTH = 100


@dataclass
class _Drafted:
    """What was decided and spent on the tree that the request's next iteration verifies."""

    decisions: tuple[str, ...]
    passes: int = 0
    free_heads: int = 0


@dataclass
class _Running:
    """A request that goes on.

    Attributes:
        drafted: None where nothing was planned for it.
    """

    prompt_len: int
    token_ids: list[int]
    sampled: bool
    drafted: _Drafted | None = field(default_factory=lambda: _Drafted((PROMPT,)))
    iterations: list[Iteration] = field(default_factory=list)


class Recorder:
    """Follows the requests of one engine.

    Args:
        folder: where the files go.
        options: the engine's, which stand in the records.
        planner: the runner's; the decisions that it took since the last step say how this step's
            drafts came about.
    """

    def __init__(self, folder: Path, options: TokenSwiftOptions, planner: Planner) -> None:
        self.folder = folder
        self._options = options
        self._planner = planner
        self._seen_decisions = dict(planner.decisions)
        self._running: dict[str, _Running] = {}

    def start(self, req_id: str, tokens: Sequence[int], sampled: bool) -> None:
        """A request comes.

        Args:
            req_id: the request.
            tokens: its prompt and whatever output it brings along.
            sampled: more of it will be drawn, not its likeliest.
        """
        self._running[req_id] = _Running(len(tokens), list(tokens), sampled)

    def note_drafts(self, drafts: Mapping[str, Drafts]) -> None:
        """A step has drafted.

        Args:
            drafts: by request, of those that it drafted for.
        """
        decisions = dict(self._planner.decisions)
        # Of one source a step either takes what pays or probes, never both.
        probes = {n for n, count in decisions.items() if count > self._seen_decisions.get(n, 0)}
        self._seen_decisions = decisions
        for req_id, request_drafts in drafts.items():
            outcome = "drafted" if len(request_drafts.tree) else "plain"
            heads = request_drafts.heads
            if heads is None:
                drafted = _Drafted((outcome,))
            else:
                name = "free_heads" if heads.free else "self_draft"
                name = f"{name}_probe" if f"{name}_probe" in probes else name
                drafted = _Drafted(
                    (outcome, name),
                    0 if heads.free else heads.own_depths,
                    free_heads=heads.num_passes if heads.free else 0,
                )
            self._running[req_id].drafted = drafted

    def note_skipped(self, req_ids: Sequence[str]) -> None:
        """A step has made no draft attempt for these requests, though it might have."""
        for req_id in req_ids:
            self._running[req_id].drafted = _Drafted(("rested",))

    def note_iteration(
        self,
        req_id: str,
        tree: DraftTree,
        accepted_nodes: list[int],
        tokens: Sequence[int],
        num_requests: int,
    ) -> None:
        """A step has verified a request's tree.

        Args:
            req_id: the request.
            tree: what was verified.
            accepted_nodes: its accepted nodes, from the root down.
            tokens: what the step emitted.
            num_requests: requests of the step.
        """
        running = self._running[req_id]
        drafted = running.drafted or _Drafted(("none",))
        running.drafted = None
        by_source, accepted_by_source = tree.nodes_by_source(accepted_nodes)
        running.iterations.append(
            Iteration(
                position=len(running.token_ids),
                emitted=len(tokens),
                drafted=by_source,
                accepted=accepted_by_source,
                side_chains=len(tree.chains) - 1,
                passes=drafted.passes,
                free_heads=drafted.free_heads,
                num_requests=num_requests,
                decisions=drafted.decisions,
            )
        )
        running.token_ids.extend(tokens)

    def finish(self, req_id: str) -> None:
        """A request has ended: its record is written, if it has emitted anything.

        A disk that fails must not end the engine: the error is logged.
        """
        running = self._running.pop(req_id)
        if not running.iterations:
            return
        record = Record(
            req_id,
            running.prompt_len,
            running.token_ids,
            self._planner.cost,
            self._options,
            running.iterations,
            running.sampled,
        )
        try:
            _write_new(self.folder, file_stem(req_id), record.to_json())
        except OSError as error:
            logger.error("No record of request %s was written: %s", req_id, error)

    def finish_all(self) -> None:
        """The engine ends, and with it whatever requests are known."""
        for req_id in list(self._running):
            self.finish(req_id)


def file_stem(req_id: str) -> str:
    """A file name for a request id, which may be whatever a client sent."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", req_id)[:_MAX_NAME_LENGTH]


def _write_new(folder: Path, stem: str, text: str) -> None:
    """Writes ``stem.json``, or with a number where the name is taken."""
    number = 1
    while True:
        name = f"{stem}.json" if number == 1 else f"{stem}.{number}.json"
        try:
            with (folder / name).open("x") as file:
                file.write(text)
        except FileExistsError:
            number += 1
        else:
            return
