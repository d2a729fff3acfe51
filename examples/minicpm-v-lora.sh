#!/usr/bin/env bash
# MiniCPM-V 2.6 with LoRA on one 24 GB card: the settings of OpenBMB's finetune_lora.sh, in bf16, with gradients and
# optimizer states in host memory. Beside the adapters it trains the token embeddings, the resampler and the vision
# tower in full, as that script does. Adapters alone need less: --modules-to-save none --tune-vision false.
# The published learning rate is 1e-6; change it with --learning-rate.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=minicpm-v-2_6
hardware=(--hw 1x24GiB --ram 64GiB)
recipe \
  --preset minicpm-lora \
  --zero 3 \
  --offload optimizer=cpu \
  --device cuda \
  -- "$@"
