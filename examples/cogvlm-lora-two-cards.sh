#!/usr/bin/env bash
# CogVLM (cogvlm-chat-hf, 490 px) with LoRA on two 24 GB cards: ZeRO-3 divides the frozen weights between the cards.
# Adapters are on the attention of both experts of every decoder layer; nothing trains in full beside them.
# Rank, alpha and dropout are those of CogVLM2's peft_lora.py, the learning rate that of CogVLM's finetune_cogvlm_lora.sh.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=cogvlm-chat
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
