#!/usr/bin/env bash
# Trains every family of models by every method for ten steps on the tiny models of tests/golden, two ranks under ZeRO-3
# with offload, and prints what it saw as the Markdown table of docs/methods.md.
set -euo pipefail
cd "$(dirname "$0")/.."
launcher=${LAUNCHER:-target/release/launcher}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp tests/golden/minicpm-v-2_6/cases/wide_two_turns/image_wide.png "$work/a.png"
{
    echo '['
    for i in 0 1 2 3; do
        [ "$i" = 0 ] || echo ','
        picture=''
        [ $((i % 2)) = 1 ] || picture='"image": "a.png", '
        echo "{\"id\": \"$i\", $picture\"conversations\": [{\"role\": \"user\", \"content\": \"What is $i?\"}, {\"role\": \"assistant\", \"content\": \"It is $i.\"}]}"
    done
    echo ']'
} > "$work/data.json"

common='--zero 3 --offload cpu --nproc 2 --precision f32 --learning-rate 1e-3 --max-steps 10 --per-device-train-batch-size 2'
cat <<HEAD
Every row was run by \`scripts/methods.sh\`: \`launcher --model PACK --data data.json $common\` and the
flags of the row. PACK is the family's directory in \`tests/golden\` (the published format with tiny sizes and random weights). Of the four
samples of every update, two have an image and two have none. The losses are those of the first and the last of ten updates.

| model | method | flags | trainable | loss, update 1 → 10 |
|---|---|---|---|---|
HEAD

row() { # name, pack, method, flags
    local out="$work/out" name=$1 pack=$2 method=$3 flags=${4% }
    rm -rf "$out"
    # shellcheck disable=SC2086
    if ! "$launcher" --model "tests/golden/$pack" --data "$work/data.json" --output "$out" $common $flags 2> "$work/log"; then
        cat "$work/log" >&2
        exit 1
    fi
    local trainable losses
    trainable=$(grep -o 'trainable [^ ]* ([^)]*)' "$work/log" | head -1 | sed 's/trainable //')
    losses=$(grep -o '"loss": *[0-9.e-]*' "$out/trainer_log.jsonl" | sed 's/.*: *//' | sed -n '1p;$p' | xargs printf '%.3f → %.3f')
    echo "| $name | $method | \`${flags//|/\\|}\` | $trainable | $losses |"
}

family() { # name, pack, connector, flags of all its rows
    local name=$1 pack=$2 connector=$3 more=${4:-}
    row "$name" "$pack" "everything" "--tune-vision true $more"
    row "$name" "$pack" "vision frozen" "--tune-vision false $more"
    row "$name" "$pack" "language model frozen" "--tune-llm false $more"
    row "$name" "$pack" "projector alone" "--train $connector $more"
    row "$name" "$pack" "norms and biases" "--train norm,bias $more"
    row "$name" "$pack" "LoRA" "--lora-rank 4 --lora-alpha 64 $more"
    row "$name" "$pack" "LoRA and modules" "--lora-rank 4 --lora-alpha 64 --lora-target-modules all --modules-to-save $connector $more"
    row "$name" "$pack" "LoRA and the language model" "--lora-rank 4 --lora-alpha 64 --tune-llm true $more"
}

family "MiniCPM-V 2.6" minicpm-v-2_6 resampler
family "MiniCPM-o 2.6" minicpm-o-2_6 resampler
family "CogVLM" cogvlm-chat-hf linear_proj
row "CogVLM" cogvlm-chat-hf "adapters per projection" '--lora-per-projection --lora-rank 4 --lora-alpha 1 --modules-to-save none --lora-target-modules language_expert_query_key_value,language_expert_dense'
row "CogVLM" cogvlm-chat-hf "p-tuning" "--ptuning-tokens 8"
family "CogVLM2" cogvlm2-llama3-chat-19B linear_proj
row "CogVLM2" cogvlm2-llama3-chat-19B "p-tuning" "--ptuning-tokens 8"
family "CogAgent" cogagent-chat-hf linear_proj "--text-without-cross"
row "CogAgent" cogagent-chat-hf "p-tuning" "--ptuning-tokens 8 --text-without-cross"
family "GLM-4V" glm-4v-9b linear_proj
family "GLM-4.1V" glm-4.1v-9b-thinking merger
family "MiniCPM-V 4.5" minicpm-v-4_5 resampler
family "MiniCPM-o 4.5" minicpm-o-4_5 resampler
family "CogAgent-9B" cogagent-9b-20241220 linear_proj
family "GLM-4.6V-Flash" glm-4.6v-flash merger
family "GLM-OCR" glm-ocr merger
