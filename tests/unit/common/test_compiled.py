"""Where compiled code is kept, and that nothing is compiled twice or in a request."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CALL = """
import numpy as np
from numba.core import caching
{before}
from vllm_tokenswift.draft.gumbel_noise import SPLITMIX, exponential
assert exponential(SPLITMIX, np.uint64(1), 2) > 0
stats = exponential.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def said(script: str, **environment: str) -> list[str]:
    """The words that a process prints."""
    process = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.split()


def hits_and_misses(before: str = "", **environment: str) -> list[int]:
    """What a process that calls one function found, and did not find, on disk."""
    return [int(number) for number in said(CALL.format(before=before), **environment)]


@pytest.mark.parametrize("variable", ["TOKENSWIFT_HOME", "NUMBA_CACHE_DIR"])
def test_what_one_process_compiled_the_next_one_loads(variable: str, tmp_path: Path) -> None:
    assert hits_and_misses(**{variable: str(tmp_path)}) == [0, 1]
    assert list(tmp_path.rglob("*.nbc"))
    assert hits_and_misses(**{variable: str(tmp_path)}) == [1, 0]


def test_where_nothing_can_be_written_it_is_compiled_all_the_same() -> None:
    """The locators of places that a test runner as root can write to are taken away."""
    only_ours = """
locators = caching.CompileResultCacheImpl._locator_classes
caching.CompileResultCacheImpl._locator_classes = [x for x in locators if "User" in x.__name__][:1]
"""
    for _ in range(2):
        assert hits_and_misses(only_ours, TOKENSWIFT_HOME="/dev/null") == [0, 1]


WARM = """
import numpy as np
from vllm_tokenswift.draft import acceptance, gumbel_noise, tree_builder
from vllm_tokenswift.draft.planner import tree_size
from vllm_tokenswift.draft.proposals import (
    context_statistics, contexts, heads, learned, ngram_table, paper, suffix_index, table, text
)
from vllm_tokenswift.draft.top_tokens import TOP_K_COLUMNS, VerifyTopK
from vllm_tokenswift.draft.warm_up import warm_up
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.tree import DraftTree

def specialisations():
    return {
        f"{module.__name__}.{name}": len(function.signatures)
        for module in (
            acceptance, gumbel_noise, tree_builder, tree_size, context_statistics, contexts, heads,
            learned, ngram_table, paper, suffix_index, table, text
        )
        for name, function in vars(module).items()
        if hasattr(function, "signatures")
    }

warm_up("MODE")
warm = specialisations()
tokens = [i % 37 for i in range(3000)] + list(range(500, 2000))
cost = CostModel(((1, 10), (17, 11.0)), chain_ms=0.01, heads_ms=0, draft_points=((0, 1),))
state = DraftState(sampled=True)
for free in (False, True):
    known = noisy_heads(tokens, [[0.5, 0.2], [0.3]], free)
    replay(tokens, Planner(cost, 64, "MODE"), 16, self_heads=known, state=state)
    replay(tokens, Planner(cost, 64, "MODE"), 16, free_heads=known, state=state)
said = np.ones((3, TOP_K_COLUMNS), np.int32)
state.append_tokens([5, 6], VerifyTopK(DraftTree.chain([5, 7]).truncate(1), said[:2]))
state.draft(None, 8)
request = PlannedRequest(state, None, state.num_tokens, 8)
planner = Planner(cost, 64, "MODE", lambda _: [(4, 8)])
planner.plan([request, request])
assert planner.wants_free_heads(planner.plan_step([request])) == [True]
state.append_tokens([7])
state.append_tokens(range(2000, 14000))  # more contexts than are kept
state.draft(None, 8)
assert specialisations() == warm, {
    name for name, number in specialisations().items() if number != warm[name]
}
"""


@pytest.mark.parametrize("mode", ["auto", "fixed", "paper"])
def test_after_warming_up_nothing_is_compiled(mode: str) -> None:
    subprocess.run([sys.executable, "-c", WARM.replace("MODE", mode)], check=True)


STARTED = """
from vllm_tokenswift.draft.warm_up import CompilingAhead, warm_up

def started():
    ahead = CompilingAhead()
    ahead.wait()
    return ahead._process is not None

print(started(), started())
"""
LOADED = """
from vllm_tokenswift.draft import tree_builder
from vllm_tokenswift.draft.planner import tree_size
from vllm_tokenswift.draft.proposals import (
    context_statistics, contexts, heads, learned, ngram_table, paper, suffix_index, text
)
for mode in ("auto", "fixed", "paper"):
    warm_up(mode)
entries = {
    id(function): function
    for module in (
        tree_builder, tree_size, context_statistics, contexts, heads, learned, ngram_table, paper,
        suffix_index, text
    )
    for function in vars(module).values()
    if hasattr(function, "stats") and "cache" in repr(type(function._cache)).lower()
}
stats = [function.stats for function in entries.values()]
print(sum(bool(s.cache_hits) for s in stats), sum(sum(s.cache_misses.values()) for s in stats))
"""


def test_what_is_compiled_ahead_in_another_process_is_loaded(tmp_path: Path) -> None:
    first, second, loaded, compiled = said(STARTED + LOADED, TOKENSWIFT_HOME=str(tmp_path))
    assert (first, second) == ("True", "False")
    assert int(loaded) > 5
    assert compiled == "0"


def test_where_nothing_can_be_kept_nothing_is_compiled_ahead() -> None:
    assert said(STARTED, TOKENSWIFT_HOME="/dev/null") == ["False", "False"]
