#!/usr/bin/env bash
# Probes a GPU, checks every kernel and measures them. Needs the output of scripts/gpu-build.sh (BIN: the directory or its
# archive), this repository and a driver. docs/gpus.md describes its use, docs/gpu-kernels.md the stages.
# Logs and tables go to OUT. With --work WORK they go to WORK, and OUT receives the summary, the tables and one archive of
# all, renewed after each stage. After a failing stage the others still run. Exits with 0 when every stage passed.
# usage: scripts/gpu-check.sh BIN [OUT] [--call 1|2|3|all] [--work WORK] [--stages a,b] [--cases a,b] [--budget SECONDS]
#        [--device cuda|cpu] [--arch native] [--small]
# The stages are divided into three calls of at most 480 s, each useful alone; all is the default. The first call shows whether
# the GPU works and how fast it is, the second checks and times every kernel, the third trains. --list prints calls, stages
# and limits.
# Kernels run as sm_80 code, as on A100 and RTX 30, whatever the GPU. --arch native compiles them for the present GPU; the
# stage `native` does so for every kernel against its reference.
# The stages `headline` (published sizes under caps of device memory), `frozen` (a base that two ranks share in host memory) and
# `parity` (this machine's CPU) run only if --stages names them. `headline` judges with figures of
# `probe` and `ceilings`, so run these first (--stages probe,ceilings,headline, or the same OUT as before). --cases selects
# cases of scripts/headline.json. --small runs every stage on the fake driver (TESSERA_CUDA_LIBS=DIR of scripts/fake-driver.sh):
# small sizes, few updates, no judgment of rates and no limit of a stage. --device cpu runs `train`, `headline`,
# `frozen`, `pipeline` and `tiles` without a GPU; the other stages need one.
set -uo pipefail

calls=(
  "warm-up:80 probe:60 doctor:20 ipc:30 graphs:30 backend:60 start:40 ceilings:40 copies:50 offload:60"
  "warm-up:60 ceilings:30 calibration:60 conformance:80 native:70 table:70 products:60 own:50"
  "warm-up:60 verify:40 train:205 ranks:50 tiles:25 pipeline:25 nccl:30 generate:25 quantized:20"
)
call_seconds=480
call=all
stages=
arch=sm_80
budget=
device=cuda
cases=
work=
one=
small=
positional=()
while [ $# -gt 0 ]; do
  case $1 in
    --call) call=${2:?--call needs 1, 2, 3 or all}; shift 2 ;;
    --list)
      for number in 1 2 3; do
        for stage in ${calls[number - 1]}; do echo "$number ${stage%:*} ${stage#*:}"; done
      done
      exit ;;
    --stages) stages=${2:?--stages needs a list}; shift 2 ;;
    --arch) arch=${2:?--arch needs sm_80 or native}; shift 2 ;;
    --work) work=${2:?--work needs a directory}; shift 2 ;;
    --one-stage) one=${2:?--one-stage needs a stage}; shift 2 ;;
    --small) small=--small; shift ;;
    --cases) cases=${2:?--cases needs a list}; shift 2 ;;
    --budget) budget=${2:?--budget needs seconds}; shift 2 ;;
    --device) device=${2:?--device needs cuda or cpu}; shift 2 ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) positional+=("$1"); shift ;;
  esac
done
[ "${#positional[@]}" -ge 1 ] || { echo "usage: $0 BIN [OUT] [--work WORK] [--stages a,b] [--cases a,b] [--budget SECONDS]" >&2; exit 2; }
case $call in
  1 | 2 | 3) chosen=${calls[call - 1]} ;;
  all) chosen=${calls[*]} ;;
  *) echo "--call needs 1, 2, 3 or all, not $call" >&2; exit 2 ;;
esac
# Updates of runs and their other settings, micro-batches of pipeline stages, seconds of waits, precisions, golden packs, and
# bytes of the measurement of the disk.
steps=8
offload_steps=10
light=
micro_batches=4
comm_timeout=60
precisions="f32 bf16 fp16 pure-bf16"
packs="$(cd "$(dirname "$0")/.." && echo "$PWD"/tests/golden/*/)"
drift=--drift
disk=1GiB
if [ -n "$small" ]; then
  steps=4
  offload_steps=2
  # The stage `verify` verifies the GPU.
  light="--verify-gpu off --per-device-train-batch-size 1 --gradient-accumulation-steps 1"
  micro_batches=2
  comm_timeout=600
  precisions="f32 bf16"
  packs="$(cd "$(dirname "$0")/.." && pwd)/tests/golden/minicpm-v-2_6"
  drift=
  disk=16MiB
fi
named=yes
# A stage of several calls runs once.
if [ -z "$stages" ]; then
  named=no
  for stage in $chosen; do
    case ",$stages," in *",${stage%:*},"*) ;; *) stages=${stages:+$stages,}${stage%:*} ;; esac
  done
  if [ "$call" = all ]; then budget=${budget:-$((3 * call_seconds))}; fi
fi
budget=${budget:-$([ "$named" = yes ] && echo 590 || echo "$call_seconds")}
[ -z "$small" ] || budget=36000
bin=$(realpath "${positional[0]}")
delivered=$(realpath -m "${positional[1]:-gpu-check-results}")
out=$(realpath -m "${work:-$delivered}")
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out" "$delivered"
export TESSERA_CUDA_ARCH=$arch
if [ -f "$bin" ]; then
  mkdir -p "$out/bin"
  python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$bin" "$out/bin" || exit 2
  bin=$out/bin
fi

# Most seconds of a stage. If less of the budget is left, that is the limit. A stage that --stages names may take longer than in
# a call, since others do not wait for it.
limit_of() {
  local stage
  if [ -n "$small" ]; then echo "$budget"; return; fi
  if [ "$named" = yes ]; then
    case $1 in headline) echo "$budget" ;; train) echo 300 ;; *) echo 180 ;; esac
    return
  fi
  for stage in ${calls[*]}; do
    if [ "${stage%:*}" = "$1" ]; then echo "${stage#*:}"; return; fi
  done
}

# Runs `launcher doctor` as a user does. It must name the GPU and its driver.
doctor() {
  "$bin/launcher" doctor --json >"$out/doctor.json" || return 1
  { echo "## launcher doctor"; echo; echo '```'; "$bin/launcher" doctor; echo '```'; echo; echo "| runs | |"; echo "|---|---|"; } >"$out/doctor.md" || return 1
  cat "$out/doctor.md"
  python3 - "$out/doctor.json" <<'PYTHON' || return 1
import json, sys
report = json.load(open(sys.argv[1]))
assert report["gpus"], "the doctor sees no GPU"
PYTHON
  hidden
}

# With an empty list of visible GPUs, --device cuda ends with E12, and the error names the variable that hides them.
hidden() {
  local code
  CUDA_VISIBLE_DEVICES='' "$bin/launcher" --device cuda --output "$out/hidden" >"$out/hidden.txt" 2>&1
  code=$?
  if [ "$code" != 13 ] || ! grep -q 'error\[E12\]' "$out/hidden.txt" || ! grep -q 'CUDA_VISIBLE_DEVICES=' "$out/hidden.txt"; then
    echo "with an empty CUDA_VISIBLE_DEVICES: exit $code instead of 13 with E12 and the variable's name"
    tail -20 "$out/hidden.txt"
    return 1
  fi
  echo "| CUDA_VISIBLE_DEVICES= | exit 13, E12 |" | tee -a "$out/doctor.md"
}

# Trains the demo for a few updates on the GPU and on the CPU, in f32: the first answer to whether training works at all.
start() {
  local where
  for where in cpu "$device"; do
    rm -rf "$out/start-$where"
    # shellcheck disable=SC2086 # the settings are several words
    "$bin/launcher" --device "$where" --nproc 1 --zero 3 --precision f32 $light --max-steps $((steps / 2)) --logging-steps 1 \
      --eval-strategy no --save-strategy no --output "$out/start-$where" >"$out/start-$where.txt" 2>&1 || { tail -20 "$out/start-$where.txt"; return 1; }
  done
  python3 "$root/scripts/gpu_start.py" "$out" cpu "$device" >"$out/start.md" || { cat "$out/start.md"; return 1; }
  cat "$out/start.md"
}

# Compares the operations and a training step of every family with the CPU, as a run does the first time it meets a GPU.
verify() {
  # It writes a report into the working directory.
  (cd "$out" && "$bin/launcher" doctor --verify-gpu) >"$out/verify.txt" 2>&1
  local code=$?
  { echo "## launcher doctor --verify-gpu"; echo; echo '```'; cat "$out/verify.txt"; echo '```'; } >"$out/verify.md"
  cat "$out/verify.txt"
  return "$code"
}

# Answers a prompt with the demo's model on the GPU and on the CPU, both with the most likely tokens, in f32.
generate() {
  "$bin/launcher" generate --help | grep -q -- --device || { not_offered generate "generate --device"; return; }
  rm -rf "$out/generate"
  # shellcheck disable=SC2086 # the settings are several words
  "$bin/launcher" --device cpu --nproc 1 --precision f32 $light --max-steps 2 --eval-strategy no --output "$out/generate" \
    >"$out/generate.txt" 2>&1 || { tail -20 "$out/generate.txt"; return 1; }
  local where
  for where in cpu "$device"; do
    "$bin/launcher" generate --model "$out/generate" --device "$where" --prompt "Which digits?" \
      --max-new-tokens 16 >"$out/generate-$where.txt" 2>"$out/generate.txt" || { tail -20 "$out/generate.txt"; return 1; }
  done
  cmp "$out/generate-cpu.txt" "$out/generate-$device.txt" || return 1
  { echo "## generation"; echo; echo "The answer of the GPU is the CPU's: $(head -1 "$out/generate-cpu.txt")"; } | tee "$out/generate.md"
}

# Trains adapters on weights of 4 bits on the GPU and on the CPU, in f32.
quantized() {
  local where
  for where in cpu "$device"; do
    rm -rf "$out/quantized-$where"
    # shellcheck disable=SC2086 # the settings are several words
    "$bin/launcher" --device "$where" --nproc 1 --precision f32 --quantize nf4 --lora-rank 8 $light --max-steps $((steps / 2)) --logging-steps 1 \
      --eval-strategy no --save-strategy no --output "$out/quantized-$where" >"$out/quantized-$where.txt" 2>&1 && continue
    if [ "$where" != cpu ] && grep -q -- '--quantize' "$out/quantized-$where.txt"; then
      not_offered quantized "--quantize on GPUs"
      return
    fi
    tail -20 "$out/quantized-$where.txt"
    return 1
  done
  python3 "$root/scripts/gpu_start.py" "$out" cpu "$device" --runs quantized >"$out/quantized.md" || { cat "$out/quantized.md"; return 1; }
  cat "$out/quantized.md"
}

# Two ranks share a base of CogVLM's layers in 4 bits in host memory, registered with the driver or through pinned chunks.
frozen() {
  local how registers run config="$root/launcher/src/commands/synth/configs/cogvlm-chat.json" tokens=2048
  [ "$device$small" = cuda ] || { config="$root/tests/golden/cogvlm-chat-hf/config.json"; tokens=300; }
  rm -rf "$out/frozen-model" "$out"/frozen-{registered,pinned}*
  python3 "$root/scripts/gpu_frozen.py" config "$config" "$out/frozen-config.json" || return 1
  "$bin/launcher" synth --model-config "$out/frozen-config.json" --weights seeded --output "$out/frozen-model" --samples 16 \
    --sample-tokens "$tokens" >"$out/frozen.txt" 2>&1 || { tail -20 "$out/frozen.txt"; return 1; }
  while read -r how registers; do
    run="$out/frozen-$how"
    TESSERA_HOST_REGISTER=$registers "$bin/launcher" --model "$out/frozen-model" --data "$out/frozen-model/samples.json" \
      --device "$device" --verify-gpu off --nproc 2 --collectives shm --zero 2 --offload cpu --precision bf16 --quantize nf4 \
      --quantize-double --lora-rank 16 --max-steps 6 --logging-steps 1 --eval-strategy no --save-strategy no --output "$run" \
      >"$run.txt" 2>&1 || { tail -20 "$run.txt"; return 1; }
    cp "$run/trainer_log.jsonl" "$run.jsonl"
    rm -rf "$run"
  done <<'RUNS'
registered auto
pinned off
RUNS
  rm -rf "$out/frozen-model"
  python3 "$root/scripts/gpu_frozen.py" judge "$out" "$device" >"$out/frozen.md" || { cat "$out/frozen.md"; return 1; }
  cat "$out/frozen.md"
}

# Trains adapters and all weights on long samples, with the feed-forward layers in tiles and on all rows at once: equal bits of
# losses and gradient norms, the peak of device memory and the time of a step. The model has wide feed-forward layers and
# seeded weights.
tiles() {
  local trained flags run tokens=12288 tile=4096 inner=8192 hidden=512 heads=4 layers=2 model="$out/tiles-model"
  # As much as a CPU or the fake driver computes in seconds. On a GPU a tile has at least 4096 rows.
  [ "$device$small" = cuda ] || { tokens=1024 tile=256 hidden=128 heads=2 layers=1; }
  [ "$device$small" != cuda--small ] || { tokens=4400 tile=4096 inner=1024; }
  rm -rf "$model"
  cat >"$out/tiles.config.json" <<JSON
{"version": 2.6, "model_type": "minicpmv", "hidden_size": $hidden, "intermediate_size": $inner, "num_hidden_layers": $layers,
 "num_attention_heads": $heads, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "vocab_size": 2000, "query_num": 16,
 "drop_vision_last_layer": false, "slice_config": {"max_slice_nums": 1, "patch_size": 14, "scale_resolution": 112},
 "vision_config": {"hidden_size": 128, "image_size": 112, "intermediate_size": 192, "num_attention_heads": 2,
  "num_hidden_layers": 2, "patch_size": 14}}
JSON
  "$bin/launcher" synth --model-config "$out/tiles.config.json" --output "$model" --weights seeded --samples 2 \
    --sample-tokens "$tokens" >"$out/tiles-synth.txt" 2>&1 || { tail -20 "$out/tiles-synth.txt"; return 1; }
  for trained in adapters weights; do
    flags="--learning-rate 1e-3"
    [ $trained = weights ] || flags="--lora-rank 8"
    for run in "tiles-$trained-whole" "tiles-$trained-tiled --mlp-tile-tokens $tile"; do
      rm -rf "$out/${run%% *}"
      # shellcheck disable=SC2086 # the settings are several words
      "$bin/launcher" --model "$model" --data "$model/samples.json" --device "$device" --nproc 1 --precision bf16 $flags \
        --model-max-length "$tokens" --per-device-train-batch-size 1 --gradient-accumulation-steps 1 --max-steps 3 --logging-steps 1 \
        --eval-strategy no --save-strategy no --output "$out/"$run >"$out/${run%% *}.txt" 2>&1 ||
        { tail -20 "$out/${run%% *}.txt"; return 1; }
    done
    python3 "$root/scripts/gpu_tiles.py" "$out" "Samples of $tokens tokens, $trained train" "tiles-$trained-whole" "tiles-$trained-tiled" \
      >"$out/tiles-$trained.md" || { cat "$out/tiles-$trained.md"; return 1; }
  done
  cat "$out/tiles-adapters.md" "$out/tiles-weights.md" | tee "$out/tiles.md"
}

# Says that this build lacks what a stage checks. The stage then checks nothing and does not fail.
not_offered() {
  echo "$1: NOT CHECKED, this build has no $2" | tee "$out/$1.md"
}

# Trains on the GPU: golden packs and the 200-step trajectory in every precision (f32 at the tolerances of the CPU, 16 bits
# also beside the CPU), the demo to its end in f32, and its first updates in every precision beside the CPU's. Compares the
# memory that the driver counts with the plan.
train() {
  local precision where run offload told more
  # The small `own` runs the packs in bf16.
  ([ -z "$small" ] || precisions=f32; packs train-parity --device "$device") || return 1
  if [ -z "$small" ]; then
    rm -rf "$out/demo"
    "$bin/launcher" --device "$device" --nproc 2 --zero 3 --offload cpu --output "$out/demo" >"$out/train-demo.txt" 2>&1 ||
      { tail -20 "$out/train-demo.txt"; return 1; }
    grep -E '^ (device|gpu|eval|resume|done)' "$out/train-demo.txt"
    "$root/.ci/check-demo" "$out/demo" || return 1
    rm -rf "$out/demo"
  fi
  for precision in $precisions; do
    # All states on the device, part of them, or none; in one run with recomputed layer inputs. The losses are equal to the
    # last bit.
    while read -r where offload told more; do
      run="$out/train-$precision-$told"
      rm -rf "$run"
      # shellcheck disable=SC2086 # the settings are several words
      "$bin/launcher" --device "$where" --nproc 1 --zero 3 --offload "$offload" --precision "$precision" $light $more --max-steps "$steps" \
        --logging-steps 1 --eval-strategy no --save-strategy no --output "$run" >"$run.txt" 2>&1 ||
        { tail -20 "$run.txt"; return 1; }
      grep -o '"loss":[^,]*' "$run/trainer_log.jsonl" >"$run.losses"
      [ "$told" = "$where" ] || cmp "$out/train-$precision-$where.losses" "$run.losses" || return 1
    done <<RUNS
cpu none cpu
$device none $device
$device optimizer=cpu $device-optimizer
$device cpu $device-states
$device param=cpu,optimizer=cpu,activation=cpu $device-layers --checkpoint-num-layers 2
RUNS
  done
  timing || return 1
  [ "$device" = cpu ] || traced || return 1
  # shellcheck disable=SC2086 # several precisions
  python3 "$root/scripts/gpu_train.py" "$out" "$device" $precisions >"$out/train.md" || { cat "$out/train.md"; return 1; }
  echo "15 runs in bf16: equal losses with and without graphs, with and without prefetched weights, with the optimizer in forward and in backward, also with clipping" >>"$out/train.md"
  cat "$out/train.md"
}

# Runs with all states in host memory, so that many bytes cross the bus, and traces the last steps. The fake driver, which runs
# commands as late as allowed, runs copies to the device as early as allowed here.
traced() {
  local run="$out/train-traced-$device"
  rm -rf "$run"
  # shellcheck disable=SC2086 # the settings are several words
  TESSERA_FAKE_EAGER=${small:+2} "$bin/launcher" --device "$device" --nproc 1 --zero 3 --precision bf16 $light --offload cpu --prefetch-weights on --max-steps 6 \
    --logging-steps 1 --trace-steps 5..7 --eval-strategy no --save-strategy no --output "$run" >"$run.txt" 2>&1 ||
    { tail -20 "$run.txt"; return 1; }
}

# Flags that only change when work is done change no bit. Runs are compared with the first run of their set, whose name is
# the first word of a line.
timing() {
  local group told first="" before="" more run
  rm -f "$out/train-timing.txt"
  while read -r group told more; do
    # Flags for GPUs only.
    [ "$device" = cuda ] || case $group in graphs | ahead) continue ;; esac
    run="$out/train-$group-$told"
    rm -rf "$run"
    # shellcheck disable=SC2086 # the settings are several words
    "$bin/launcher" --device "$device" --nproc 1 --zero 3 --precision bf16 $light $more --max-steps "$steps" --logging-steps 1 \
      --eval-strategy no --save-strategy no --output "$run" >"$run.txt" 2>&1 || { tail -20 "$run.txt"; return 1; }
    grep -o '"loss":[^,]*' "$run/trainer_log.jsonl" >"$run.losses"
    cp "$run/trainer_log.jsonl" "$run.jsonl"
    echo "$group $told ${run##*/}.jsonl" >>"$out/train-timing.txt"
    rm -rf "$run"
    [ "$group" = "$before" ] || first="$run"
    before="$group"
    cmp "$first.losses" "$run.losses" || return 1
    if [ "$told" = early ] && ! grep -q 'units are updated while backward runs' "$run.txt"; then
      echo "$run: no unit was updated while backward ran"
      return 1
    fi
    if [ "$group $told" = "late on" ] && ! grep -q 'is updated beside the next pass' "$run.txt"; then
      echo "$run: no unit was updated beside the next pass"
      return 1
    fi
  done <<'RUNS'
graphs off --offload cpu --cuda-graph off
graphs on --offload cpu --cuda-graph on
graphs auto --offload cpu --cuda-graph auto
ahead off --offload cpu --prefetch-weights off
ahead on --offload cpu --prefetch-weights on
late off --offload cpu --optimizer-in-backward off --optimizer-in-forward off
late on --offload cpu --optimizer-in-backward off --optimizer-in-forward on
clipped late --offload cpu --optimizer-in-backward off --max-grad-norm 0.05
clipped early --offload cpu --optimizer-in-backward all --max-grad-norm 0.05
clipped some --offload cpu --optimizer-in-backward 1MiB --max-grad-norm 0.05
clipped beside --offload cpu --optimizer-in-backward off --optimizer-in-forward on --max-grad-norm 0.05
unclipped late --offload cpu --optimizer-in-backward off --max-grad-norm 0
unclipped early --offload cpu --optimizer-in-backward all --max-grad-norm 0
weights late --optimizer-in-backward off --offload optimizer=cpu
weights early --optimizer-in-backward all --offload optimizer=cpu
RUNS
}

# Runs with ranks that share the GPU. They read each other's memory (ipc), use host memory (shm), or use NCCL. The first two
# have the same bits; NCCL sums in an order of its own.
ranks() {
  local name count more how run failed=0
  {
    echo "## ranks on one GPU"
    echo
    echo "| ranks | settings | collectives | losses | seconds per step |"
    echo "|---|---|---|---|---|"
  } >"$out/ranks.md"
  while read -r name count more; do
    for how in shm ipc nccl; do
      # NCCL has no shard groups and may refuse ranks that share a GPU. One pair is enough: last, beside shm.
      case $name-$how in
        nccl-ipc) continue ;;
        nccl-*) ;;
        *-nccl) continue ;;
      esac
      run="$out/ranks-$name-$how"
      rm -rf "$run" "$run.jsonl"
      # shellcheck disable=SC2086 # the settings are several words
      "$bin/launcher" --device "$device" --nproc "$count" $light $more --collectives "$how" --comm-timeout "$comm_timeout" --max-steps "$steps" \
        --logging-steps 1 --eval-strategy no --save-strategy no --output "$run" >"$run.txt" 2>&1 ||
        { echo "$name $how:"; tail -20 "$run.txt"; failed=1; continue; }
      cp "$run/trainer_log.jsonl" "$run.jsonl"
      rm -rf "$run"
    done
    python3 "$root/scripts/gpu_ranks.py" "$out/ranks-$name" "$count" "$more" >>"$out/ranks.md" || failed=1
  done <<'CASES'
two 2 --zero 3 --offload cpu --precision f32
resident 2 --zero 3 --offload none --precision bf16
gradients 2 --zero 2 --offload optimizer=cpu --precision bf16
four 4 --zero 3 --offload cpu --precision pure-bf16
groups 4 --zero 3 --shard-group 2 --offload cpu --precision bf16
nccl 2 --zero 3 --offload cpu --precision f32
CASES
  cat "$out/ranks.md"
  return "$failed"
}

# Trains with the layers on two pipeline stages that share the GPU, through host memory and by peer access, and on two GPUs where
# there are two. The bits are those of one rank.
pipeline() {
  local precision how flags seen run gpus=0 failed=0 first=${CUDA_VISIBLE_DEVICES:-0}
  {
    echo "## pipeline stages"
    echo
    echo "| ranks | settings | layers | losses | seconds per step |"
    echo "|---|---|---|---|---|"
  } >"$out/pipeline.md"
  [ "$device" = cpu ] ||
    gpus=$("$bin/launcher" doctor --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["gpus"]))') || return 1
  for precision in f32 bf16; do
    for how in undivided divided divided-ipc two-gpus; do
      flags="--nproc 2 --mp-size 2" seen=${first%%,*}
      case $how in
        undivided) flags="--nproc 1" ;;
        divided) flags="$flags --collectives shm" ;;
        divided-ipc) [ "$device" = cpu ] && continue; flags="$flags --collectives ipc" ;;
        two-gpus) [ "$gpus" -ge 2 ] || continue; seen=${CUDA_VISIBLE_DEVICES:-0,1} ;;
      esac
      run="$out/pipeline-$precision-$how"
      rm -rf "$run" "$run.jsonl"
      # shellcheck disable=SC2086 # the settings are several words
      CUDA_VISIBLE_DEVICES=$seen "$bin/launcher" --device "$device" $flags --zero 0 --precision "$precision" $light \
        --gradient-accumulation-steps "$micro_batches" --comm-timeout "$comm_timeout" --max-steps "$((steps / 2))" --logging-steps 1 --eval-strategy no \
        --save-strategy no --output "$run" >"$run.txt" 2>&1 || { echo "$precision $how:"; tail -20 "$run.txt"; failed=1; continue; }
      cp "$run/trainer_log.jsonl" "$run.jsonl"
      rm -rf "$run"
    done
    python3 "$root/scripts/gpu_ranks.py" "$out/pipeline-$precision" 2 "--mp-size 2 --precision $precision" >>"$out/pipeline.md" || failed=1
  done
  cat "$out/pipeline.md"
  return "$failed"
}

# Runs golden packs of every family and the 200-step trajectory, in every precision. Results are in NAME-PRECISION.txt.
packs() {
  local name=$1 precision text
  shift
  for precision in $precisions; do
    text="$out/$name-$precision.txt"
    # shellcheck disable=SC2086 # several directories; no flag if it is empty
    "$bin/parity" "$@" --precision "$precision" $drift $packs >"$text" 2>&1 ||
      { grep -Ev ' ok($|  \()' "$text" | grep -E 'FAIL|read|error|cause|evidence|next' | head -20; return 1; }
    echo "$precision: $(tail -1 "$text")"
  done
}

# Runs the packs without cuBLASLt, as on a machine with a driver alone. Our kernels compute all products.
own() {
  # The small `train` runs the packs in f32.
  [ -z "$small" ] || precisions=bf16
  echo "## our own products" >"$out/own.md"
  TESSERA_MATMUL=own packs own --device "$device" | tee -a "$out/own.md"
  return "${PIPESTATUS[0]}"
}

# Runs the packs on this machine's CPU. Another CPU is a check of the tolerances.
parity() {
  local precision
  packs parity || return 1
  echo "## parity" >"$out/parity.md"
  for precision in $precisions; do
    { echo; echo "$precision:"; echo; echo '```'; grep -E 'margin:|agree|passed|200 steps' "$out/parity-$precision.txt"; echo '```'; } >>"$out/parity.md"
  done
}

# Measures the machine's disk, and compares the losses of every tier in each precision. They are equal to the last digit.
offload() {
  local spill precision tier run
  spill=$(mktemp -d)
  "$bin/launcher" bench nvme "$spill" --size "$disk" >"$out/nvme.txt" || return 1
  for precision in $precisions; do
    for tier in none cpu "nvme:$spill"; do
      run="$out/run-$precision-${tier%%:*}"
      # shellcheck disable=SC2086 # the settings are several words
      "$bin/launcher" --zero 3 --offload "$tier" --precision "$precision" $light --max-steps "$offload_steps" --eval-strategy no \
        --output "$run" >"$run.txt" 2>&1 || { tail -20 "$run.txt"; return 1; }
      grep -o '"loss":[^,]*' "$run/trainer_log.jsonl" >"$out/losses-$precision-${tier%%:*}"
      rm -rf "$run"
      cmp "$out/losses-$precision-none" "$out/losses-$precision-${tier%%:*}" || return 1
    done
  done
  # Optimizer in backward: the losses of updates after backward, with gradients that are not stored and with clipping.
  for clip in 0 0.5; do
    for early in off all; do
      run="$out/run-early-$clip-$early"
      # shellcheck disable=SC2086 # the settings are several words
      "$bin/launcher" --zero 3 --offload "nvme:$spill" --precision bf16 $light --max-grad-norm "$clip" --optimizer-in-backward "$early" \
        --max-steps "$offload_steps" --eval-strategy no --output "$run" >"$run.txt" 2>&1 || { tail -20 "$run.txt"; return 1; }
      grep -o '"loss":[^,]*' "$run/trainer_log.jsonl" >"$out/losses-early-$clip-$early"
      rm -rf "$run"
    done
    cmp "$out/losses-early-$clip-off" "$out/losses-early-$clip-all" || return 1
  done
  rm -rf "$spill"
  { echo "## disk and tiers"; echo; echo '```'; cat "$out/nvme.txt"; echo "16 runs: losses equal on every tier, and with the optimizer in backward"; echo '```'; } >"$out/offload.md"
}

# Runs the cases at published sizes, each with a time limit of its own.
headline() {
  python3 "$root/scripts/gpu_headline.py" "$bin" "$out" --seconds "$limit" --device "$device" ${cases:+--cases "$cases"} \
    ${packages:+--packages "$packages"}
}

packages=$(python3 -c 'import site, sys; print(":".join(site.getsitepackages() + [p for p in sys.path if p.endswith("-packages")]))' 2>/dev/null || true)

# A stage that is a function runs in a process that can be stopped.
if [ -n "$one" ]; then
  # Processes that the stage starts must end before the stage is killed.
  limit=$((budget > 20 ? budget - 10 : budget))
  "$one"
  exit
fi

# Writes the tables, the summary and one archive of all results.
deliver() {
  local stage
  {
    echo "# GPU check, $(date -u +%Y-%m-%d), kernels of $arch"
    echo
    for stage in ${stages//,/ }; do
      [ -f "$out/$stage.md" ] && cat "$out/$stage.md" && echo
    done
  } >"$out/results.md"
  tar -czf "$out.tar.gz" -C "$out" --exclude=all.tar.gz --exclude=kernel-cache --exclude=./bin . 2>/dev/null || true
  mv "$out.tar.gz" "$delivered/all.tar.gz"
  [ "$out" = "$delivered" ] || cp "$out/results.md" "$out/summary.txt" "$delivered/"
}

started=$SECONDS
failed=()
: >"$out/summary.txt"
for stage in ${stages//,/ }; do
  left=$((budget - (SECONDS - started)))
  limit=$(limit_of "$stage")
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    failed+=("$stage")
    echo "$stage: NOT RUN, the budget of $budget s is spent" | tee -a "$out/summary.txt"
    continue
  fi
  echo "== $stage (at most $limit s)"
  begun=$SECONDS
  rm -f "$out/$stage.md" "$out/$stage.json" "$out/$stage.log"
  if [ "$(type -t "$stage")" = function ]; then
    timeout --kill-after=5 "$limit" bash "$0" "$bin" "$delivered" --work "$out" --one-stage "$stage" --budget "$limit" \
      --device "$device" --arch "$arch" ${cases:+--cases "$cases"} $small 2>&1 | tee "$out/$stage.log"
    code=${PIPESTATUS[0]}
  else
    timeout --kill-after=5 "$limit" "$bin/gpu_check" "$stage" --out "$out" --emulated "$bin/emulated" \
      --seconds $((limit > 10 ? limit - 5 : limit)) ${packages:+--python-packages "$packages"} \
      ${small:---peers "$root/scripts/gpu_peers.py"} 2>&1 | tee "$out/$stage.log"
    code=${PIPESTATUS[0]}
  fi
  took=$((SECONDS - begun))
  case $code in
    0) echo "$stage: passed in $took s" >>"$out/summary.txt" ;;
    124 | 137) failed+=("$stage"); echo "$stage: STOPPED after $took s" >>"$out/summary.txt" ;;
    *) failed+=("$stage"); echo "$stage: FAILED (exit $code) in $took s" >>"$out/summary.txt" ;;
  esac
  deliver
done

echo
echo "== summary ($((SECONDS - started)) s), tables in $delivered/results.md"
cat "$out/summary.txt"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "NOT PASSED: ${failed[*]}"
  exit 1
fi
echo "ALL PASSED"
