#!/usr/bin/env bash
# Trains heads for MODEL on text that it writes itself, and says what came of it:
#
#   examples/train_heads.sh MODEL HEADS [TOKENS] [ARGUMENTS OF train]
#
# HEADS is a new folder. TOKENS of text are written (1,000,000). The heads are of the sequential
# form: each reads the token drafted before it. On a machine without a GPU, for a try:
#
#   examples/train_heads.sh "$(vllm-tokenswift prepare-model)" heads 20000 \
#       --vocabulary 2048 --num-steps 20 --batch-size 4 --seq-tokens 512
#
# A run that was interrupted goes on when it is started again. Afterwards:
#
#   vllm serve MODEL --speculative-config '{"method": "tokenswift", "heads": "HEADS"}'
set -euo pipefail
usage="usage: train_heads.sh MODEL HEADS [TOKENS] [ARGUMENTS OF train]"
model=${1:?$usage}
heads=${2:?$usage}
tokens=${3:-1000000}
shift $(($# < 3 ? $# : 3))
vllm-tokenswift train --model "$model" --self-distill "$tokens" --out "$heads" \
    --form sequential --vocabulary 8192 --learning-rate 3e-3 --num-steps 1000 \
    --batch-size 24 --grad-accumulation 1 --seq-tokens 2048 "$@"
