"""The engine process itself: makes one vLLM engine and writes the batches it is given.

``python -m vllm_tokenswift.demo.engine_child REPLIES``: each line of standard input is one
order in JSON, answered by one line of JSON on the file descriptor ``REPLIES`` (standard
output is for the progress bar). The first order holds the engine's keyword arguments, the
others are lists of batches, or ``{"call": a method of the workers, "arguments": its own}``;
these are answered when they are done. Ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

from vllm_tokenswift.demo.texts import Batch, TextRequest, Written, WrittenBatch


def main(replies: int) -> None:
    """Serves orders until standard input ends.

    Args:
        replies: the file descriptor that answers are written to.
    """
    from vllm import LLM

    orders = map(json.loads, sys.stdin)
    with os.fdopen(replies, "w") as out:
        engine = next(orders)
        llm = LLM(**engine)
        speculates = (engine.get("speculative_config") or {}).get("method") == "tokenswift"
        print("{}", file=out, flush=True)
        for order in orders:
            if isinstance(order, dict):
                answers = llm.collective_rpc(order["call"], args=tuple(order["arguments"]))
                print(json.dumps(answers), file=out, flush=True)
                continue
            batches = [
                Batch(batch["name"], [TextRequest(**text) for text in batch["texts"]])
                for batch in order
            ]
            written = [asdict(write(llm, batch, speculates)) for batch in batches]
            print(json.dumps(written), file=out, flush=True)


def write(llm: Any, batch: Batch, speculates: bool) -> WrittenBatch:
    """Writes a batch, under a progress bar.

    Args:
        llm: vLLM's ``LLM``.
        batch: the texts to write at the same time.
        speculates: whether TokenSwift counts there.

    Returns:
        The texts with the times at which their tokens came.
    """
    from tqdm import tqdm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokenizer = llm.get_tokenizer()
    engine = llm.llm_engine
    requests = []
    for asked in batch.texts:
        message = [{"role": "user", "content": asked.prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        params = SamplingParams(
            **asked.sampling, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        requests.append((prompt, params))
    texts = [Written(asked.name) for asked in batch.texts]
    before = _stats(llm) if speculates else {}
    bar = tqdm(
        total=sum(params.max_tokens for _, params in requests),
        desc=batch.name,
        unit=" tokens",
        file=sys.stdout,
        ncols=88,
        # A log file gets a line now and then, a terminal a bar that moves.
        mininterval=0.2 if sys.stdout.isatty() else 10,
    )
    start = time.perf_counter()
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            completion = output.outputs[0]
            if not completion.token_ids:
                continue
            text = texts[int(output.request_id)]
            text.tokens.extend(completion.token_ids)
            text.counts.append(len(text.tokens))
            text.seconds.append(now)
            for at in completion.logprobs or ():
                text.logprobs.append({token: entry.logprob for token, entry in at.items()})
            bar.update(len(completion.token_ids))
    bar.close()
    for text in texts:
        text.text = tokenizer.decode(text.tokens)
    return WrittenBatch(batch.name, texts, _grown(before, _stats(llm)) if speculates else {})


def _stats(llm: Any) -> dict[str, Any]:
    # Every rank of a tensor-parallel group counts the same.
    stats: dict[str, Any] = llm.collective_rpc("tokenswift_stats")[0]
    return stats


def _grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What counters, and counters by name, have grown by."""
    grown: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict):
            grown[name] = _grown(before.get(name, {}), value)
        else:
            grown[name] = value - before.get(name, 0)
    return grown


if __name__ == "__main__":
    main(int(sys.argv[1]))
