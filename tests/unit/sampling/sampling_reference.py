"""Plain decoding by vLLM's own parts, and decoding over trees by the tree_sampler.

The *model* is a deterministic function of the last tokens, so that the logits of
a tree node depend on its path, as those of a language model do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from vllm_tokenswift.sampling.processors import EtaSampling, WindowedPenalty
from vllm_tokenswift.sampling.tree_sampler import TreeSampler, VerifyRows
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

CPU = torch.device("cpu")


def model_logits(tokens: Sequence[int], vocab_size: int) -> torch.Tensor:
    """float32 ``[vocab]``, decided by the last three tokens."""
    seed = hash(tuple(tokens[-3:])) & 0x7FFFFFFF  # hashes of ints do not change between runs
    noise = np.random.default_rng(seed).standard_normal(vocab_size, dtype=np.float32)
    return torch.from_numpy(noise * np.float32(2.5))


def new_generator(params: SamplingParams) -> torch.Generator | None:
    """As ``GPUModelRunner._update_states`` makes one."""
    if params.seed is None or params.temperature < 1e-5:
        return None
    generator = torch.Generator()
    generator.manual_seed(params.seed)
    return generator


class PlainDecoder:
    """vLLM's InputBatch, Sampler and processors over the model above: no speculation."""

    def __init__(self, vocab_size: int, max_num_reqs: int = 8, max_model_len: int = 256) -> None:
        self.vocab_size = vocab_size
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs), additional_config={}
        )
        kinds = (
            MinTokensLogitsProcessor,
            LogitBiasLogitsProcessor,
            MinPLogitsProcessor,
            WindowedPenalty,
            EtaSampling,
        )
        self.batch = InputBatch(
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_model_len,
            device=CPU,
            vocab_size=vocab_size,
            block_sizes=[16],
            max_num_blocks_per_req=[max_model_len // 16],
            logitsprocs=LogitsProcessors(kind(config, CPU, False) for kind in kinds),
            logitsprocs_need_output_token_ids=True,
        )
        # On the CPU the device tensors are the host tensors (CPUModelRunner).
        for name in list(vars(self.batch)):
            if name.endswith("_cpu_tensor") and getattr(self.batch, name) is not None:
                setattr(self.batch, name.removesuffix("_cpu_tensor"), getattr(self.batch, name))
        self.sampler = Sampler()
        self.requests: dict[str, CachedRequestState] = {}

    def add(self, req_id: str, params: SamplingParams, prompt: list[int]) -> None:
        request = CachedRequestState(
            req_id=req_id,
            prompt_token_ids=prompt,
            mm_features=[],
            sampling_params=params,
            generator=new_generator(params),
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
        self.requests[req_id] = request
        self.batch.add_request(request)
        self.batch.refresh_metadata()

    def remove(self, req_id: str) -> None:
        """Take a request out of the batch; the others move up (as preemption does)."""
        self.batch.remove_request(req_id)
        self.batch.condense()
        self.batch.refresh_metadata()

    def resume(self, req_id: str) -> None:
        self.batch.add_request(self.requests[req_id])
        self.batch.refresh_metadata()

    def step(self) -> torch.Tensor:
        """One token for every request in the batch; returns the raw logits."""
        self.batch.refresh_metadata()
        requests = [self.requests[req_id] for req_id in self.batch.req_ids]
        logits = torch.stack(
            [
                model_logits([*(r.prompt_token_ids or []), *r.output_token_ids], self.vocab_size)
                for r in requests
            ]
        )
        output = self.sampler(logits.clone(), self.batch.sampling_metadata)
        self.logprobs = output.logprobs_tensors
        for request, token in zip(requests, output.sampled_token_ids[:, 0].tolist(), strict=True):
            request.output_token_ids.append(token)
        return logits


def decode_plainly(
    params: SamplingParams, prompt: list[int], num_tokens: int, vocab_size: int
) -> list[int]:
    decoder = PlainDecoder(vocab_size)
    decoder.add("plain", params, prompt)
    for _ in range(num_tokens):
        decoder.step()
    return decoder.requests["plain"].output_token_ids


def random_tree(
    rng: random.Random, vocab_size: int, right: Sequence[int], max_nodes: int = 12
) -> DraftTree:
    """A random tree; half the time a stretch of the ``right`` continuation is in it."""
    if rng.random() < 0.1:
        return EMPTY_TREE
    tokens: list[int] = []
    parents: list[int] = []
    node = 0
    if rng.random() < 0.5:
        for token in right[: rng.randint(1, 5)]:
            tokens.append(token)
            parents.append(node)
            node = len(tokens)
    for _ in range(rng.randint(1, max_nodes)):
        tokens.append(rng.randrange(vocab_size))
        parents.append(rng.randint(0, len(tokens) - 1))
    order = _depth_first(parents, rng)
    number = {old: new for new, old in enumerate(order)}
    return DraftTree.build(
        [tokens[old - 1] for old in order[1:]], [number[parents[old - 1]] for old in order[1:]]
    )


def _depth_first(parents: Sequence[int], rng: random.Random) -> list[int]:
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents, start=1):
        children[parent].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        rng.shuffle(children[node])
        stack.extend(children[node])
    return order


def tree_logits(tree: DraftTree, text: Sequence[int], vocab_size: int) -> torch.Tensor:
    """float32 ``[len(tree) + 1, vocab]``: the model's logits at every node."""
    rows = []
    for node in range(len(tree) + 1):
        path = [int(tree.tokens[i - 1]) for i in tree.path(node)]
        rows.append(model_logits([*text, *path], vocab_size))
    return torch.stack(rows)


class TreeDecoder:
    """Decodes several requests with a TreeSampler; the trees come from ``plant``."""

    def __init__(
        self,
        tree_sampler: TreeSampler,
        plant: Callable[[str, Sequence[int]], DraftTree],
    ) -> None:
        self.tree_sampler = tree_sampler
        self.plant = plant
        self.prompts: dict[str, list[int]] = {}
        self.outputs: dict[str, list[int]] = {}

    def add(self, req_id: str, params: SamplingParams, prompt: list[int]) -> None:
        self.prompts[req_id] = prompt
        self.outputs[req_id] = []
        self.tree_sampler.add_request(req_id, params, prompt, [], new_generator(params))

    def step(self, req_ids: Sequence[str]) -> None:
        groups: list[VerifyRows] = []
        rows: list[torch.Tensor] = []
        for req_id in req_ids:
            tree = self.plant(req_id, self.outputs[req_id])
            text = [*self.prompts[req_id], *self.outputs[req_id]]
            groups.append(VerifyRows(req_id, tree))
            rows.append(tree_logits(tree, text, self.tree_sampler.vocab_size))
        accepted, self.logprobs = self.tree_sampler.sample_trees(torch.cat(rows), groups)
        for req_id, group in zip(req_ids, accepted, strict=True):
            assert len(group.tokens) == len(group.nodes) + 1
            self.outputs[req_id].extend(group.tokens)
            self.tree_sampler.commit_tokens(req_id, group.tokens)
        self.accepted = accepted
