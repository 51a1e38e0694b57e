#!/usr/bin/env bash
# Serves MODEL with TokenSwift; a request then sets its penalty through vllm_xargs:
#
#   curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{
#     "prompt": "The lighthouse", "max_tokens": 500, "temperature": 1, "min_p": 0.1,
#     "vllm_xargs": {"penalty_theta": 1.1, "penalty_window": 1024}}'
set -euo pipefail
exec vllm serve "${1:?usage: serve.sh MODEL}" \
    --speculative-config '{"method": "tokenswift", "budget_tokens": 4096}'
