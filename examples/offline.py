"""Long texts offline: two requests of one batch with different sampling.

python examples/offline.py [MODEL]
"""

import sys

from vllm import LLM, SamplingParams

from vllm_tokenswift.demo import model as demo_model


def main() -> None:
    llm = LLM(
        sys.argv[1] if len(sys.argv) > 1 else str(demo_model.prepare()),
        max_model_len=2048,
        speculative_config={"method": "tokenswift", "penalty_window": 1024},
    )
    greedy = SamplingParams(temperature=0, max_tokens=300)
    penalised = SamplingParams(
        temperature=1, min_p=0.1, seed=7, max_tokens=300, extra_args={"penalty_theta": 1.1}
    )
    message = [{"role": "user", "content": "Tell me about the sea."}]
    for output in llm.chat([message, message], [greedy, penalised]):
        print(output.outputs[0].text, "\n---")
    print(llm.collective_rpc("tokenswift_stats")[0])


if __name__ == "__main__":
    main()
