"""``vllm-tokenswift explain RECORD``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_tokenswift.explain.record import Record, read_record

_PICTURE_STEPS = 60


def add_parser(subparsers: Any) -> None:
    """Adds ``vllm-tokenswift explain``.

    Args:
        subparsers: of the console command (:mod:`vllm_tokenswift.cli`).
    """
    parser = subparsers.add_parser(
        "explain",
        help="what was drafted, accepted and spent over a finished generation",
        description=(
            "Prints what was drafted, accepted and spent over the length of a generation, and "
            "the time lost against an oracle; draws it into a PNG. Times are estimates of the "
            "engine's cost model, for the request alone. Records are written by an engine with "
            'the option "record".'
        ),
    )
    parser.add_argument("record", type=Path, metavar="RECORD", help="a record's JSON file")
    parser.add_argument("--rows", type=int, default=15, help="rows of the table (15)")
    parser.add_argument("--picture", type=Path, help="the PNG's path (beside the record)")
    parser.set_defaults(run=explain)


def explain(arguments: argparse.Namespace) -> None:
    """Prints what a record says, and draws it.

    Args:
        arguments: ``record``, ``rows`` and ``picture``, as parsed.

    Raises:
        ValueError: where there is nothing that could be explained, or the picture cannot be
            written.
    """
    from vllm_tokenswift.explain.picture import draw
    from vllm_tokenswift.explain.stretches import regret_report, stretches, table, total

    if arguments.rows < 1:
        raise ValueError(f"--rows is {arguments.rows}: it must be at least 1")
    record = read_record(arguments.record)
    if not any(iteration.is_decode for iteration in record.iterations):
        raise ValueError(f"{arguments.record} holds no decode iteration: nothing was drafted")
    parts = stretches(record, arguments.rows)
    whole = total(parts)
    print(_head(record))
    print(table(parts))
    print("under a source: nodes accepted/drafted; lost: against the oracle below\n")
    print(f"Estimated speed-up over plain decoding: {whole.plain_ms / whole.times.total_ms:.2f}")
    print(regret_report(whole))
    picture: Path = arguments.picture or arguments.record.with_suffix(".png")
    try:
        draw(stretches(record, _PICTURE_STEPS), f"request {record.request_id}", picture)
    except OSError as error:
        raise ValueError(f"{picture} cannot be written: {error.strerror}") from error
    print(f"picture: {picture}")


def _head(record: Record) -> str:
    options = record.options
    line = (
        f"request {record.request_id}: {record.prompt_len} prompt tokens, "
        f"{len(record.token_ids) - record.prompt_len} written; plan {options.plan}, at most "
        f"{options.num_speculative_tokens} nodes, budget {options.budget_tokens} tokens"
    )
    shared = sum(iteration.num_requests > 1 for iteration in record.iterations)
    if shared:
        line += (
            f"\n{shared} of {len(record.iterations)} iterations ran beside other requests; "
            "times are as if it had run alone"
        )
    return line
