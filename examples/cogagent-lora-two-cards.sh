#!/usr/bin/env bash
# CogAgent (cogagent-chat-hf, or a SAT directory with --tokenizer DIR) with LoRA on two 24 GB cards: ZeRO-3 divides the
# frozen weights between the cards. Four cards need no other flag. Adapters are on the attention of both experts.
# `launcher export OUTPUT --format sat --mp-size 2` writes the result as a SAT directory.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=cogagent-chat
hardware=(--hw 2x24GiB --ram 64GiB)
recipe \
  --lora-rank 8 \
  --lora-alpha 32 \
  --lora-dropout 0.1 \
  --learning-rate 1e-5 \
  --zero 3 \
  --model-max-length 2048 \
  --device cuda \
  -- "$@"
