#!/usr/bin/env bash
# MiniCPM-o 2.6 in full on two RTX 3090: language model and resampler train, 7.7 billion parameters; the vision tower is
# frozen. Weights, moments and gradients are bf16 with stochastic rounding; gradients and moments are in host memory.
# Samples have at most 1024 tokens, and images are not cut into slices.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=minicpm-o-2_6
hardware=(--hw 2x24GiB --ram 64GiB)
recipe \
  --train llm,resampler \
  --precision pure-bf16 \
  --zero 3 \
  --offload optimizer=cpu \
  --model-max-length 1024 \
  --max-slice-nums 1 \
  --learning-rate 1e-6 \
  --device cuda \
  -- "$@"
