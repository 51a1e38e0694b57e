#!/usr/bin/env bash
# Serves MODEL with TokenSwift, on the port of $PORT (8000). Further arguments go to vLLM:
#
#   examples/serve.sh MODEL --max-model-len 32768
#
# examples/client.py talks to it; so does curl:
#
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{
#     "prompt": "The lighthouse", "max_tokens": 500, "temperature": 1, "min_p": 0.1,
#     "vllm_xargs": {"penalty_theta": 1.1, "penalty_window": 1024}}'
set -euo pipefail
model=${1:?usage: serve.sh MODEL [ARGUMENTS OF VLLM]}
shift
arguments=(
    --port "${PORT:-8000}"
    --speculative-config '{"method": "tokenswift", "budget_tokens": 4096}'
    "$@"
)
# vLLM's CPU build is another package, in which the command `vllm` does not start.
if python -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    exec vllm serve "$model" "${arguments[@]}"
fi
exec python -m vllm.entrypoints.openai.api_server --model "$model" "${arguments[@]}"
