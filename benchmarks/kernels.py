"""Checks every CUDA kernel against its eager twin on a GPU, then times variants.

    python benchmarks/kernels.py [--check-only] [--out FOLDER]

Needs a CUDA device, torch, triton and vLLM (FlashAttention 3 for the prefix rows of the
table; without it those rows are missing). ``xformers``, where installed, is timed beside.
On one H100 it takes about three minutes, most of it compilation.

Memory errors and races, on small inputs and without PyTorch's caching of memory:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \
        python benchmarks/kernels.py --check-only
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck \
        python benchmarks/kernels.py --check-only

Every check prints one line ``ok NAME error`` or ``WRONG NAME error``; the exit status is 1
if any is wrong. Times are medians over replays of a CUDA graph that holds 20 calls;
``host`` is what one eager call costs the host.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton

from vllm_tokenswift.cuda.attention.block_scores import block_scores, block_scores_reference
from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.cuda.attention.kv_move import move_kv, move_kv_reference
from vllm_tokenswift.cuda.attention.prefix_kernel import (
    prefix_attention,
    prefix_attention_reference,
)
from vllm_tokenswift.cuda.attention.tree_kernel import (
    pack_ancestors,
    tree_attention,
    tree_attention_reference,
    unpack_ancestors,
)
from vllm_tokenswift.cuda.heads.beam_kernels import (
    ENTRY,
    WIDTH,
    choose_paths,
    enter_head,
    leave_head,
    top_tokens,
)
from vllm_tokenswift.cuda.sampling.penalty_kernel import (
    penalise_windows,
    penalise_windows_reference,
)
from vllm_tokenswift.cuda.sampling.row_parameters import RowSampling, RowWindows
from vllm_tokenswift.cuda.sampling.sample_kernel import sample_rows, sample_rows_reference
from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K, TOP_K_COLUMNS
from vllm_tokenswift.engine.head_beam import BEAM_WIDTH
from vllm_tokenswift.heads.model import SequentialHead
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.penalty.window import penalise
from vllm_tokenswift.tree import DraftTree

DEVICE = torch.device("cuda")
BLOCK_SIZE = 16
CALLS_PER_GRAPH = 20


@dataclass(frozen=True)
class Shape:
    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int


LLAMA_8B = Shape("8B", 32, 8, 128)
LLAMA_MHA = Shape("MHA", 32, 32, 128)


class Report:
    """Collects checks and times; ``rows`` become the JSON record."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []
        self.wrong = 0

    def check(self, name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
        """Relative error in the Euclidean norm; NaN is wrong."""
        difference = (actual.double() - expected.double()).norm()
        error = float(difference / expected.double().norm().clamp_min(1e-30))
        right = error <= limit
        self.wrong += not right
        self.rows.append({"check": name, "error": error, "limit": limit, "right": right})
        print(
            f"{'ok' if right else 'WRONG':5} {name:58} {error:.1e} (limit {limit:.0e})", flush=True
        )

    def time(self, name: str, function: Callable[[], object], host: bool = False) -> float:
        device_us = graph_time_us(function)
        row: dict[str, object] = {"time": name, "device_us": round(device_us, 2)}
        line = f"{name:64} {device_us:9.1f} us"
        if host:
            row["host_us"] = round(host_time_us(function), 1)
            line += f"   host {row['host_us']} us"
        self.rows.append(row)
        print(line, flush=True)
        return device_us

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Runs an optional part: what another library lacks or refuses is recorded, not fatal."""
        try:
            part()
        except Exception as error:
            self.rows.append({"not run": name, "because": f"{type(error).__name__}: {error}"[:300]})
            print(f"not run: {name}: {type(error).__name__}: {str(error)[:160]}", flush=True)


def graph_time_us(function: Callable[[], object]) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            function()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH)
    return statistics.median(times[2:])


def host_time_us(function: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            function()
        times.append((time.perf_counter() - start) * 1e5)
    torch.cuda.synchronize()
    return statistics.median(times)


def random_tree(n: int, seed: int) -> DraftTree:
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(max(0, i - 6), i + 1)) for i in range(n)]
    return DraftTree.build(rng.integers(0, 100, n).astype(np.int32), parents)


def make_caches(
    num_layers: int, num_blocks: int, shape: Shape, dtype: torch.dtype, block_size: int = BLOCK_SIZE
) -> CacheLayers:
    """vLLM's logical shape in FlashAttention's physical order (``LBNHC``)."""
    caches = []
    for _ in range(num_layers):
        physical = torch.randn(
            num_blocks,
            block_size,
            shape.num_kv_heads,
            2 * shape.head_size,
            dtype=dtype,
            device=DEVICE,
        )
        caches.append(physical.transpose(1, 2))
    return CacheLayers.of(caches)


class TreeCase:
    """Trees with fresh q, k, v and a paged prefix each."""

    def __init__(
        self, shape: Shape, sizes: list[int], contexts: list[int], dtype: torch.dtype
    ) -> None:
        self.scale = shape.head_size**-0.5
        trees = [random_tree(n, seed=n + 1) for n in sizes]
        self.ancestors = torch.from_numpy(np.concatenate([pack_ancestors(t) for t in trees])).to(
            DEVICE
        )
        widths = [n + 1 for n in sizes]
        self.starts = [0, *np.cumsum(widths).tolist()]
        self.start_loc = torch.tensor(self.starts, dtype=torch.int32, device=DEVICE)
        self.max_rows = max(widths)
        rows = self.starts[-1]
        # As vLLM has them: slices of one row of q, k and v.
        qkv = torch.randn(
            rows,
            shape.num_heads + 2 * shape.num_kv_heads,
            shape.head_size,
            dtype=dtype,
            device=DEVICE,
        )
        self.query, self.key, self.value = qkv.split(
            [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        self.contexts = contexts
        self.prefix_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
        blocks = [-(-(c + w) // BLOCK_SIZE) for c, w in zip(contexts, widths, strict=True)]
        self.layers = make_caches(1, sum(blocks), shape, dtype)
        self.cache = self.layers.caches[0]
        order = torch.randperm(sum(blocks), device=DEVICE).int()
        self.table = torch.zeros(len(sizes), max(blocks), dtype=torch.int32, device=DEVICE)
        for i, part in enumerate(order.split(blocks)):
            self.table[i, : len(part)] = part
        self.out = torch.empty_like(self.query, memory_format=torch.contiguous_format)

    def finish(self, states: torch.Tensor, lse: torch.Tensor, **launch: int) -> None:
        tree_attention(
            self.query,
            self.key,
            self.value,
            states,
            lse,
            self.out,
            self.start_loc,
            self.ancestors,
            self.scale,
            self.max_rows,
            **launch,
        )

    def triton_prefix(self, num_slices: int, **launch: int) -> tuple[torch.Tensor, torch.Tensor]:
        return prefix_attention(
            self.query,
            self.cache,
            self.table,
            self.prefix_lens,
            self.start_loc,
            self.scale,
            self.max_rows,
            num_slices,
            **launch,
        )

    def flash_prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        key, value = self.cache.transpose(1, 2).split(self.query.shape[2], dim=-1)
        state, lse = flash_attn_varlen_func(
            q=self.query,
            k=key,
            v=value,
            out=self.out,
            cu_seqlens_q=self.start_loc,
            max_seqlen_q=self.max_rows,
            seqused_k=self.prefix_lens,
            max_seqlen_k=max(self.contexts),
            softmax_scale=self.scale,
            causal=False,
            block_table=self.table,
            return_softmax_lse=True,
            fa_version=3,
        )
        return state.unsqueeze(0), lse.unsqueeze(0)

    def reference(self) -> torch.Tensor:
        """float32 throughout: the eager twins one after the other."""
        states, lse = prefix_attention_reference(
            self.query, self.cache, self.table, self.prefix_lens, self.start_loc, self.scale
        )
        out = torch.empty_like(self.query, dtype=torch.float32)
        tree_attention_reference(
            self.query,
            self.key,
            self.value,
            states,
            lse,
            out,
            self.starts,
            self.ancestors,
            self.scale,
        )
        return out


LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def check_attention(report: Report) -> None:
    sizes, contexts = [32, 0, 128, 7], [700, 33, 128, 0]
    for shape, dtype in (
        (LLAMA_8B, torch.bfloat16),
        (LLAMA_8B, torch.float16),
        (LLAMA_8B, torch.float32),
        (LLAMA_MHA, torch.bfloat16),
        (Shape("9/3 heads of 64", 9, 3, 64), torch.bfloat16),
        (Shape("8/1 heads of 80", 8, 1, 80), torch.float16),
        (Shape("4/2 heads of 256", 4, 2, 256), torch.bfloat16),
    ):
        name = f"{shape.name} {str(dtype).removeprefix('torch.')}"
        case = TreeCase(shape, sizes, contexts, dtype)
        expected = case.reference()
        for num_slices in (1, 4):
            case.out.fill_(math.nan)
            case.finish(*case.triton_prefix(num_slices))
            report.check(
                f"triton prefix ({num_slices}) + tree, {name}", case.out, expected, LIMITS[dtype]
            )
        if dtype is not torch.float32:

            def with_flash(
                case: TreeCase = case, expected: torch.Tensor = expected, name: str = name
            ) -> None:
                case.out.fill_(math.nan)
                states, lse = case.flash_prefix()
                assert lse.shape == (1, case.query.shape[1], case.query.shape[0]), lse.shape
                case.finish(states, lse)
                report.check(
                    f"FA3 prefix + tree in place, {name}",
                    case.out,
                    expected,
                    LIMITS[case.query.dtype],
                )

            report.attempt(f"FA3 prefix, {name}", with_flash)


def check_cache_kernels(report: Report) -> None:
    shape = Shape("", 8, 2, 64)
    for block_size in (16, 32):
        layers = make_caches(3, 40, shape, torch.bfloat16, block_size)
        copies = CacheLayers.of([c.clone() for c in layers.caches])
        src = torch.tensor([[40, 42, 43, 50, -1], [200, 201, 230, 231, 232]], device=DEVICE)
        dst = torch.tensor([[39, 40, 41, 42, -1], [199, 200, 201, 202, 203]], device=DEVICE)
        move_kv(layers, src, dst)
        move_kv_reference(copies, src, dst)
        report.check(
            f"kv move, blocks of {block_size}",
            torch.stack(list(layers.caches)),
            torch.stack(list(copies.caches)),
            0.0,
        )
        queries = torch.randn(3, 3, 8, 64, dtype=torch.bfloat16, device=DEVICE)
        table = torch.randperm(40, device=DEVICE)[:36].reshape(3, 12).int()
        lens = torch.tensor([9 * block_size + 5, 12 * block_size, 0], device=DEVICE).int()
        report.check(
            f"block scores, blocks of {block_size}",
            block_scores(queries, layers, table, lens, 0.125),
            block_scores_reference(queries, layers, table, lens, 0.125),
            1e-4,
        )


def penalty_case(rows: int, window: int) -> tuple[RowWindows[torch.Tensor], torch.Tensor]:
    """Windows of so many rows of one request, and theta."""

    def int32(values: object) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)

    windows = RowWindows(
        history=torch.randint(0, 900, (1, window), dtype=torch.int32, device=DEVICE),
        history_lens=int32([window]),
        window_sizes=int32([window]),
        owners=int32([0] * rows),
        path=torch.randint(0, 900, (rows, 8), dtype=torch.int32, device=DEVICE),
        depths=torch.arange(rows, dtype=torch.int32, device=DEVICE) % 9,
    )
    return windows, torch.full((rows,), 1.1, device=DEVICE)


def sampling_case(rows: int, vocab: int) -> tuple[torch.Tensor, RowSampling]:
    """Logits, and how their rows are sampled."""
    return torch.randn(rows, vocab, device=DEVICE) * 3, RowSampling(
        seeds=torch.randint(1 << 62, (rows,), device=DEVICE),
        positions=1000 + torch.arange(rows, device=DEVICE) % 9,
        temperature=torch.ones(rows, device=DEVICE),
        min_p=torch.full((rows,), 0.1, device=DEVICE),
        eta_epsilon=torch.zeros(rows, device=DEVICE),
        eta_alpha=torch.zeros(rows, device=DEVICE),
    )


def check_sampling(report: Report) -> None:
    windows, theta = penalty_case(17, 500)
    logits = torch.randn(17, 5000, device=DEVICE)
    expected = logits.clone()
    penalise_windows(logits, windows, theta)
    penalise_windows_reference(expected, windows, theta)
    report.check("windowed penalty", logits, expected, 1e-7)
    logits, sampling = sampling_case(65, 49152)
    sampling.temperature[::3] = 0.8
    sampling.temperature[1::5] = 0.0
    sampling.min_p[::2] = 0.0
    sampling.eta_epsilon[::4] = 2e-4
    sampling.eta_alpha[::4] = 2e-4**0.5
    shape = (65, TOP_K_COLUMNS)
    top_k, expected_top_k = torch.full((2, *shape), NO_TOKEN, dtype=torch.int32, device=DEVICE)
    same = sample_rows(logits, sampling, verify_top_k=top_k) == sample_rows_reference(
        logits, sampling, verify_top_k=expected_top_k
    )
    report.check(
        "sampled tokens, at most one of 65 differs", same.double().cpu(), torch.ones(65), 0.13
    )
    unlikely = expected_top_k[:, :TOP_K] == NO_TOKEN
    chances = [
        rows.view(torch.float32)[:, TOP_K:].masked_fill(unlikely, 0.0)
        for rows in (top_k, expected_top_k)
    ]
    report.check("chances of the likeliest tokens", chances[0], chances[1], 1e-5)


def check_heads(report: Report) -> None:
    """The kernels between a head beam's matrix products, each in memory of its own.

    Not the graphs that hold them (``cuda/heads/beam_graph.py``): without PyTorch's caching of
    memory nothing can be captured.
    """
    for hidden, dtype in ((576, torch.float32), (4096, torch.bfloat16)):
        check_head_states(report, hidden, dtype)
    for part, dtype in ((45, torch.float32), (2500, torch.bfloat16)):  # one chunk, and three
        check_head_tokens(report, part, dtype)
    check_head_paths(report)


@torch.inference_mode()
def check_head_states(report: Report, hidden: int, dtype: torch.dtype) -> None:
    layer = SequentialHead(hidden, eps=1e-6, width=40).to(DEVICE, dtype)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    rows = torch.tensor([0, 0, 2, 1, 1, 2], device=DEVICE)
    states = torch.randn(3, hidden, dtype=dtype, device=DEVICE)
    embedded = torch.randn(len(rows), hidden, dtype=dtype, device=DEVICE)
    entries = torch.zeros(len(rows), ENTRY, dtype=torch.int32, device=DEVICE)
    entries[:, 1] = rows
    both = torch.full_like(embedded.repeat(1, 2), math.nan)
    moved, read = torch.full_like(embedded, math.nan), torch.full_like(embedded, math.nan)
    state_norm, token_norm = layer.input_layernorm, layer.token_layernorm
    enter_head(
        entries, states, embedded, state_norm.weight, token_norm.weight, state_norm.eps, moved, both
    )
    name = f"hidden size {hidden} {str(dtype).removeprefix('torch.')}"
    expected = torch.cat([state_norm(states[rows]), token_norm(embedded)], dim=-1)
    report.check(f"what a head reads, {name}", both, expected, LIMITS[dtype])
    report.check(f"states that heads start from, {name}", moved, states[rows], 0.0)
    difference = layer.down(torch.nn.functional.silu(layer.up(both)))
    leave_head(moved, difference, layer.post_layernorm.weight, layer.post_layernorm.eps, read)
    expected = layer.advance(states[rows], embedded)
    report.check(f"states that heads come to, {name}", moved, expected, LIMITS[dtype])
    report.check(f"what the LM head reads, {name}", read, layer.read(expected), LIMITS[dtype])


def check_head_tokens(report: Report, part: int, dtype: torch.dtype) -> None:
    """Blind; with temperature, penalty and half the noise's power; with all of it."""
    level, positions = 2, [0, 70_000, 5]
    draws = [SeedNoise(torch.Generator().manual_seed(seed)) for seed in (1, 7, 2**63 + 3)]
    powers = [0.0, 0.5, 1.0]
    plain, positive, negative = [1.0, 1.25, 1.0], [0.9, 1.25 / 1.3, 1.0], [1.1, 1.25 * 1.3, 1.0]
    scales = torch.tensor([plain, positive, negative, powers], device=DEVICE).T.contiguous()
    tokens = torch.randperm(2 * part, device=DEVICE)[:part]
    penalised = torch.randint(2, (len(draws), part), dtype=torch.uint8, device=DEVICE)
    logits = (torch.randn(len(draws) * BEAM_WIDTH, part, device=DEVICE) * 3).to(dtype)
    entries = torch.full((len(logits), ENTRY), -1, dtype=torch.int32, device=DEVICE)
    top_tokens(
        logits,
        penalised,
        scales,
        tokens,
        entries,
        torch.tensor([draw.seed for draw in draws], device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        level,
    )
    by_sign = torch.where(penalised[:, None].bool(), scales[:, 1:3, None], scales[:, :1, None])
    expected = DraftVocabulary.probabilities(
        logits, by_sign.repeat_interleave(BEAM_WIDTH, 0)
    ).double()
    for request, (draw, position, power) in enumerate(zip(draws, positions, powers, strict=True)):
        gumbel_noise = draw.noise_from(position)
        noise = torch.tensor([gumbel_noise.noise(level, token) for token in tokens.tolist()])
        expected[request * BEAM_WIDTH : (request + 1) * BEAM_WIDTH] /= (
            noise.double().to(DEVICE) ** power
        )
    expected /= expected.sum(-1, keepdim=True)
    # Of equals the first counts.
    order = expected.argsort(dim=-1, descending=True, stable=True)[:, :WIDTH]
    name = f"{part} tokens {str(dtype).removeprefix('torch.')}"
    report.check(f"a head's likeliest, {name}", entries[:, 4 : 4 + WIDTH], tokens[order], 0.0)
    chances = entries.view(torch.float32)[:, 4 + WIDTH :]
    report.check(f"their chances, {name}", chances, expected.gather(1, order), 1e-4)


def check_head_paths(report: Report) -> None:
    """Of one path that may fork, of two, and of two that nothing likely enough follows."""
    above = torch.tensor([[1.0, 0.0], [0.6, 0.4], [0.2, 0.1]], device=DEVICE)
    least = 0.1
    entries = torch.full((2, above.numel(), ENTRY), -1, dtype=torch.int32, device=DEVICE)
    offered = torch.randint(900, (above.numel(), WIDTH), dtype=torch.int32, device=DEVICE)
    shares = torch.randn(above.numel(), WIDTH, device=DEVICE).softmax(-1).sort(descending=True)[0]
    entries[0, :, 4 : 4 + WIDTH] = offered
    chances = entries.view(torch.float32)
    chances[0, :, 0], chances[0, :, 4 + WIDTH :] = above.flatten(), shares
    tokens = torch.full((above.numel(),), -1, device=DEVICE)
    choose_paths(entries, tokens, least)
    products = (above.view(-1, 1) * shares).view(len(above), -1)
    best = products.sort(descending=True, stable=True)
    followed = (best.values[:, :BEAM_WIDTH] >= least).flatten()
    first_paths = torch.arange(0, above.numel(), BEAM_WIDTH, device=DEVICE)[:, None]
    places = best.indices[:, :BEAM_WIDTH]
    report.check(
        "chances of followed paths",
        chances[1, :, 0],
        best.values[:, :BEAM_WIDTH].flatten() * followed,
        0.0,
    )
    for name, actual, expected in (
        ("paths that they go on from", entries[1, :, 1], first_paths + places // WIDTH),
        ("places that they go on from", entries[1, :, 2], places % WIDTH),
        ("tokens that they end with", tokens, offered.view(len(above), -1).gather(1, places)),
    ):
        report.check(name, actual[followed], expected.flatten()[followed], 0.0)


def time_tree_kernel(report: Report) -> None:
    for shape in (LLAMA_8B, LLAMA_MHA):
        case = TreeCase(shape, [32], [1000], torch.bfloat16)
        states, lse = torch.randn_like(case.out)[None], torch.randn(1, shape.num_heads, 33).cuda()
        times = {}
        for block_m, block_n, num_warps in (
            (16, 16, 2),
            (16, 32, 2),
            (16, 64, 4),
            (32, 16, 2),
            (32, 32, 2),
            (32, 32, 4),
            (32, 64, 4),
            (64, 32, 4),
            (64, 64, 4),
            (64, 64, 8),
        ):
            launch = {"block_m": block_m, "block_n": block_n, "num_warps": num_warps}
            name = f"tree kernel {shape.name} 32 nodes m{block_m} n{block_n} w{num_warps}"
            times[(block_m, block_n, num_warps)] = report.time(
                name, lambda c=case, s=states, e=lse, k=launch: c.finish(s, e, **k)
            )
        best = min(times, key=lambda variant: times[variant])
        print(f"  best for {shape.name}: m{best[0]} n{best[1]} w{best[2]}", flush=True)
        for nodes in (0, 8, 16, 64, 128):
            case = TreeCase(shape, [nodes], [1000], torch.bfloat16)
            states = torch.randn_like(case.out)[None]
            lse = torch.randn(1, shape.num_heads, nodes + 1, device=DEVICE)
            report.time(
                f"tree kernel {shape.name} {nodes} nodes, as launched",
                lambda c=case, s=states, e=lse: c.finish(s, e),
                host=nodes == 16,
            )


def time_prefix(report: Report) -> None:
    for shape, contexts in ((LLAMA_8B, (4096, 51200, 102400)), (LLAMA_MHA, (4096, 51200))):
        for context in contexts:
            for nodes in (0, 16, 31, 32, 63):
                case = TreeCase(shape, [nodes], [context], torch.bfloat16)
                name = f"{shape.name} context {context}, {nodes + 1} rows"

                def flash(c: TreeCase = case, n: str = name) -> None:
                    report.time(f"FA3 prefix {n}", c.flash_prefix, host=c.contexts == [4096])
                    report.time(f"FA3 prefix + tree {n}", lambda: c.finish(*c.flash_prefix()))

                report.attempt(f"FA3 {name}", flash)
                if nodes == 31:
                    for slices, launch in (
                        (8, {"block_m": 64, "block_n": 32, "num_warps": 4}),
                        (32, {"block_m": 64, "block_n": 32, "num_warps": 4}),
                        (32, {"block_m": 64, "block_n": 64, "num_warps": 4}),
                        (32, {"block_m": 128, "block_n": 64, "num_warps": 8}),
                    ):
                        variant = f"s{slices} m{launch['block_m']} n{launch['block_n']}"
                        report.time(
                            f"triton prefix + tree {name} {variant}",
                            lambda c=case, s=slices, k=launch: c.finish(*c.triton_prefix(s, **k)),
                        )
                    report.attempt(
                        f"triton unified {name}", lambda c=case, n=name: time_unified(report, c, n)
                    )
                    report.attempt(
                        f"xformers {name}", lambda c=case, n=name: time_xformers(report, c, n)
                    )


def time_unified(report: Report, case: TreeCase, name: str) -> None:
    """vLLM's Triton attention with a query-query bias; the tree's K and V in the cache."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    rows = case.max_rows
    key, value = case.cache.transpose(1, 2).split(case.query.shape[2], dim=-1)
    for row in range(rows):
        block, offset = divmod(case.contexts[0] + row, BLOCK_SIZE)
        key[case.table[0, block], offset] = case.key[row]
        value[case.table[0, block], offset] = case.value[row]
    seen = unpack_ancestors(case.ancestors, rows)
    bias = torch.zeros(rows, rows, device=DEVICE).masked_fill(~seen, -math.inf)
    total = case.contexts[0] + rows
    lens = torch.tensor([total], dtype=torch.int32, device=DEVICE)

    def run() -> None:
        unified_attention(
            q=case.query,
            k=key,
            v=value,
            out=case.out,
            cu_seqlens_q=case.start_loc,
            max_seqlen_q=rows,
            seqused_k=lens,
            max_seqlen_k=total,
            softmax_scale=case.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=case.table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            qq_bias=bias,
        )

    run()
    report.check(f"triton unified with bias {name}", case.out, case.reference(), 1e-2)
    report.time(f"triton unified with bias {name}", run)


def time_xformers(report: Report, case: TreeCase, name: str) -> None:
    """xformers' tree attention, over a prefix that is contiguous instead of paged."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention as xformers_tree_attention

    rows, num_heads, size = case.query.shape
    groups = case.cache.shape[1]
    context = case.contexts[0]
    blocks = case.table[0, : -(-context // BLOCK_SIZE)].long()
    cached = case.cache[blocks].transpose(1, 2).flatten(0, 1)[:context].contiguous()

    def grouped(x: torch.Tensor) -> torch.Tensor:  # [1, tokens, groups, heads of a group, size]
        return x[None, :, :, None].expand(1, -1, -1, num_heads // groups, -1)

    query = case.query.reshape(1, rows, groups, num_heads // groups, size)
    seen = unpack_ancestors(case.ancestors, rows)
    bias = torch.zeros(rows, rows, dtype=query.dtype, device=DEVICE).masked_fill(~seen, -math.inf)
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens([rows], context, [context])
    arguments = (
        query,
        grouped(case.key),
        grouped(case.value),
        grouped(cached[..., :size].contiguous()),
        grouped(cached[..., size:].contiguous()),
        bias,
        prefix_bias,
    )
    out = xformers_tree_attention(*arguments)
    report.check(f"xformers {name}", out.reshape_as(case.out), case.reference(), 1e-2)
    report.time(f"xformers tree attention {name}", lambda: xformers_tree_attention(*arguments))


def time_cache_kernels(report: Report) -> None:
    context, num_layers = 102400, 32
    layers = make_caches(num_layers, context // BLOCK_SIZE, LLAMA_8B, torch.bfloat16)
    src = torch.tensor([[3, 7, 8, 11, 19, 20, 21, 30]], device=DEVICE)
    dst = torch.arange(8, device=DEVICE)[None]
    for stripe, num_warps in ((256, 1), (512, 2), (1024, 4), (2048, 4)):
        report.time(
            f"kv move 8 slots x 32 layers stripe {stripe} w{num_warps}",
            lambda s=stripe, w=num_warps: move_kv(layers, src, dst, stripe=s, num_warps=w),
            host=stripe == 512,
        )
    queries = torch.randn(num_layers, 1, 32, 128, dtype=torch.bfloat16, device=DEVICE)
    table = torch.randperm(context // BLOCK_SIZE, device=DEVICE).int()[None]
    lens = torch.tensor([context], dtype=torch.int32, device=DEVICE)
    for tile_tokens, tiles, num_warps in (
        (64, 4, 4),
        (64, 8, 4),
        (64, 4, 2),
        (128, 4, 4),
        (128, 4, 8),
        (32, 8, 2),
    ):
        report.time(
            f"block scores {context} x 32 layers t{tile_tokens} x{tiles} w{num_warps}",
            lambda t=tile_tokens, n=tiles, w=num_warps: block_scores(
                queries, layers, table, lens, 0.088, t, n, w
            ),
        )


def time_sampling(report: Report) -> None:
    every_row = torch.arange(33, device=DEVICE)[:, None]
    tokens = torch.randint(0, 900, (33, 1032), device=DEVICE)
    theta = torch.full((33, 1), 1.1, device=DEVICE)
    for vocab in (49152, 128256):
        case = sampling_case(33, vocab)
        for chunk, num_warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
            report.time(
                f"sample 33 x {vocab} chunk {chunk} w{num_warps}",
                lambda c=case, k=chunk, w=num_warps: sample_rows(*c, chunk=k, num_warps=w),
                host=chunk == 4096,
            )
        report.time(
            f"sample 33 x {vocab} in vLLM's launches",
            lambda c=case: sample_rows_reference(*c),
            host=True,
        )
        logits, penalty = case[0], penalty_case(33, 1024)
        report.time(
            f"penalty 33 x {vocab}",
            lambda x=logits, p=penalty: penalise_windows(x, *p),
            host=True,
        )
        report.time(
            f"penalty 33 x {vocab} PyTorch, indices at hand",
            lambda x=logits: penalise(x, every_row, tokens, theta),
            host=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check-only", action="store_true", help="no timing; for the sanitizer")
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(DEVICE)
    report = Report()
    report.rows.append(
        {"device": properties.name, "torch": torch.__version__, "triton": triton.__version__}
    )
    print(report.rows[0], flush=True)
    parts = [check_attention, check_cache_kernels, check_sampling, check_heads]
    if not arguments.check_only:
        parts += [time_tree_kernel, time_prefix, time_cache_kernels, time_sampling]
    begin = time.perf_counter()
    for part in parts:
        part(report)
        print(f"-- {part.__name__} done at {time.perf_counter() - begin:.0f} s", flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kernels.json").write_text(json.dumps(report.rows, indent=1))
    print(f"{report.wrong} checks wrong")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
