"""The console command ``vllm-tokenswift``: subcommands live beside what they do."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMAND_MODULES = (
    "vllm_tokenswift.demo.model",
    "vllm_tokenswift.heads.cli",
    "vllm_tokenswift.explain.cli",
)
"""Modules with ``add_parser(subparsers)``; a subcommand sets ``run``, a function of the
parsed arguments that returns the exit status (None for 0)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand.

    A ValueError or RuntimeError is the user's to mend: its sentence is printed without a
    traceback.

    Args:
        arguments: of the command line; the process's own unless given.

    Returns:
        The exit status, 1 where something is to be mended.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-tokenswift", description="Tools around TokenSwift for vLLM."
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMAND_MODULES:
        importlib.import_module(module).add_parser(subparsers)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed) or 0
    except (ValueError, RuntimeError) as error:
        print(f"vllm-tokenswift: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
