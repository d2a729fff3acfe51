#!/usr/bin/env bash
# GLM-4V-9B with LoRA on one 48 GB card: the settings of GLM-4's lora.yaml, on the fused attention layer that its names
# mean. The vision tower is frozen. Data is GLM-4's JSON lines; --data-format names another form.
# The published recipe does not train the token that ends an answer; --train-on-turn-end true does.
# On a 24 GB card add --offload cpu: the frozen weights are then in host memory.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=glm-4v-9b
hardware=(--hw 1x48GiB --ram 64GiB)
recipe \
  --preset glm4v-lora \
  --device cuda \
  -- "$@"
