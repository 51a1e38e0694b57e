"""Writes a long story into a file, as it comes, and says how fast it came.

    python examples/long_story.py [--model MODEL] [--tokens 20000] [--out story.txt]
        [--heads HEADS] [--record FOLDER]

With ``--record`` the engine leaves a record of the request, from which ``vllm-tokenswift
explain`` tells what was drafted, accepted and spent over the length of the text.
"""

import argparse
import asyncio
import time
from pathlib import Path

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_tokenswift.demo import model as demo_model

PROMPT = (
    "Write a very long story about a lighthouse keeper who finds a map in a bottle, with many "
    "chapters, places and people."
)
PROMPT_ROOM = 256  # tokens
REPORT_TOKENS = 1000


async def write(arguments: argparse.Namespace) -> None:
    options: dict[str, object] = {"method": "tokenswift"}
    if arguments.record:
        options["record"] = arguments.record
    heads = arguments.heads or (None if arguments.model else demo_model.HEADS)
    if heads:
        options["heads"] = heads
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=arguments.model or str(demo_model.prepare()),
            max_model_len=arguments.tokens + PROMPT_ROOM,
            speculative_config=options,
        )
    )
    tokenizer = engine.get_tokenizer()
    message = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    params = SamplingParams(
        temperature=1,
        min_p=0.1,
        seed=arguments.seed,
        max_tokens=arguments.tokens,
        min_tokens=arguments.tokens,  # the end of the text is not its end of turn
        extra_args={"penalty_theta": arguments.theta, "penalty_window": 1024},
        output_kind=RequestOutputKind.DELTA,
    )
    num_tokens, next_report = 0, REPORT_TOKENS
    start = time.perf_counter()
    with arguments.out.open("w") as story:
        async for output in engine.generate(prompt, params, request_id="story"):
            written = output.outputs[0]
            story.write(written.text)
            story.flush()
            num_tokens += len(written.token_ids)
            if num_tokens >= next_report:
                next_report += REPORT_TOKENS
                seconds = time.perf_counter() - start
                print(f"{num_tokens} tokens, {num_tokens / seconds:.1f} a second", flush=True)
    seconds = time.perf_counter() - start
    [stats, *_] = await engine.collective_rpc("tokenswift_stats")
    engine.shutdown()
    print(
        f"{num_tokens} tokens in {seconds:.0f} s, "
        f"{stats['num_emitted_tokens'] / stats['num_iterations']:.2f} an iteration, "
        f"accepted by source: {stats['accepted_by_source']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or hub repository (default: the demo model)")
    parser.add_argument("--heads", help="a checkpoint of heads for the model")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--theta", type=float, default=1.1, help="of the windowed penalty")
    parser.add_argument("--record", help="a folder for the request's record")
    parser.add_argument("--out", type=Path, default=Path("story.txt"))
    asyncio.run(write(parser.parse_args()))


if __name__ == "__main__":
    main()
