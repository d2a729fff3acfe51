#!/usr/bin/env bash
# GLM-4.6V-Flash with LoRA on one 24 GB card. No script is published for it; the settings are those of GLM-4V's lora.yaml,
# on the attention of the decoder. The vision tower is frozen.
# With --offload cpu the frozen weights are in host memory, and 4.2 GB of the card are used; longer samples then fit.
set -euo pipefail
source "$(dirname "$0")/recipe.bash"

published=glm-4.6v-flash
hardware=(--hw 1x24GiB --ram 64GiB)
recipe \
  --preset glm-4.6v-flash-lora \
  --device cuda \
  -- "$@"
