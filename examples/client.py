"""Streams a text from a server with TokenSwift, through OpenAI's client.

    examples/serve.sh MODEL
    python examples/client.py [--theta 1.1] [--plain] [PROMPT]

What OpenAI's protocol does not know goes into ``extra_body``: ``min_p`` is vLLM's own, and
TokenSwift's parameters of a request stand in ``vllm_xargs``.
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="Write a long story about a lighthouse.")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--theta", type=float, default=1.1, help="of the windowed penalty")
    parser.add_argument("--plain", action="store_true", help="do not speculate for this request")
    arguments = parser.parse_args()

    # A local server asks for no key; the client wants one all the same.
    client = OpenAI(base_url=arguments.url, api_key="none")
    [model] = client.models.list().data
    stream = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": arguments.prompt}],
        max_tokens=arguments.tokens,
        temperature=1,
        seed=arguments.seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={
            "min_p": 0.1,
            "vllm_xargs": {
                "penalty_theta": arguments.theta,
                "penalty_window": 1024,
                "tokenswift": not arguments.plain,
            },
        },
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
