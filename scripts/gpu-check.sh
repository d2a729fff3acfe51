#!/usr/bin/env bash
# Turns any GPU into figures: probes it, checks every kernel, measures them. Needs what scripts/gpu-build.sh put into
# BIN_DIR, this repository and a driver. Logs and tables go to OUT, a summary is printed last; a failing stage does
# not stop the others; exits with 0 when every stage passed.
# usage: scripts/gpu-check.sh BIN_DIR [OUT] [--stages a,b] [--budget SECONDS]
set -uo pipefail

stages=probe,doctor,ceilings,ipc,nccl,calibration,conformance,backend,table,parity,offload
budget=470
positional=()
while [ $# -gt 0 ]; do
  case $1 in
    --stages) stages=${2:?--stages needs a list}; shift 2 ;;
    --budget) budget=${2:?--budget needs seconds}; shift 2 ;;
    -*) echo "unknown option $1" >&2; exit 2 ;;
    *) positional+=("$1"); shift ;;
  esac
done
[ "${#positional[@]}" -ge 1 ] || { echo "usage: $0 BIN_DIR [OUT] [--stages a,b] [--budget SECONDS]" >&2; exit 2; }
bin=$(realpath "${positional[0]}")
out=$(realpath -m "${positional[1]:-gpu-check-results}")
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"

# Seconds a stage may take at most; the rest of the budget when less is left.
limit_of() {
  case $1 in
    probe | doctor) echo 30 ;;
    ceilings) echo 60 ;;
    ipc) echo 40 ;;
    nccl) echo 60 ;;
    calibration) echo 90 ;;
    *) echo 180 ;;
  esac
}

# The user's own view of the machine: it must name the GPU and its driver.
doctor() {
  "$bin/launcher" doctor --json >"$out/doctor.json" || return 1
  { echo "## launcher doctor"; echo; echo '```'; "$bin/launcher" doctor; echo '```'; } >"$out/doctor.md" || return 1
  cat "$out/doctor.md"
  python3 - "$out/doctor.json" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["gpus"], "the doctor sees no GPU"
PYTHON
}

# Golden packs of every family on this machine: another processor checks the tolerances, and the GPU once training runs on it.
parity() {
  "$bin/parity" "$root"/tests/golden/*/ >"$out/parity.txt" || { grep FAIL "$out/parity.txt"; return 1; }
  { echo "## parity"; echo; echo '```'; grep -E 'margin:|agree|passed' "$out/parity.txt"; echo '```'; } >"$out/parity.md"
  tail -1 "$out/parity.txt"
}

# The machine's disk, and every tier: the same losses to the last digit, in each precision.
offload() {
  local spill precision tier run
  spill=$(mktemp -d)
  "$bin/launcher" bench nvme "$spill" --size 1GiB >"$out/nvme.txt" || return 1
  for precision in f32 bf16 fp16 pure-bf16; do
    for tier in none cpu "nvme:$spill"; do
      run="$out/run-$precision-${tier%%:*}"
      "$bin/launcher" --zero 3 --offload "$tier" --precision "$precision" --max-steps 10 --eval-strategy no \
        --output "$run" >"$run.txt" 2>&1 || { tail -20 "$run.txt"; return 1; }
      grep -o '"loss":[^,]*' "$run/trainer_log.jsonl" >"$out/losses-$precision-${tier%%:*}"
      rm -rf "$run"
      cmp "$out/losses-$precision-none" "$out/losses-$precision-${tier%%:*}" || return 1
    done
  done
  rm -rf "$spill"
  { echo "## disk and tiers"; echo; echo '```'; cat "$out/nvme.txt"; echo "12 runs: losses equal on every tier"; echo '```'; } >"$out/offload.md"
}

packages=$(python3 -c 'import site, sys; print(":".join(site.getsitepackages() + [p for p in sys.path if p.endswith("-packages")]))' 2>/dev/null || true)
started=$SECONDS
failed=()
: >"$out/summary.txt"
for stage in ${stages//,/ }; do
  left=$((budget - (SECONDS - started)))
  limit=$(limit_of "$stage")
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -lt 5 ]; then
    failed+=("$stage")
    echo "$stage: NOT RUN, the budget of $budget s is used up" | tee -a "$out/summary.txt"
    continue
  fi
  echo "== $stage (at most $limit s)"
  begun=$SECONDS
  rm -f "$out/$stage.md" "$out/$stage.json" "$out/$stage.log"
  if [ "$stage" = doctor ] || [ "$stage" = parity ] || [ "$stage" = offload ]; then
    "$stage" 2>&1 | tee "$out/$stage.log"
    code=${PIPESTATUS[0]}
  else
    timeout --kill-after=5 "$limit" "$bin/gpu_check" "$stage" --out "$out" --emulated "$bin/emulated" \
      --seconds $((limit > 10 ? limit - 5 : limit)) ${packages:+--python-packages "$packages"} \
      --peers "$root/scripts/gpu_peers.py" 2>&1 | tee "$out/$stage.log"
    code=${PIPESTATUS[0]}
  fi
  took=$((SECONDS - begun))
  case $code in
    0) echo "$stage: passed in $took s" >>"$out/summary.txt" ;;
    124 | 137) failed+=("$stage"); echo "$stage: STOPPED after $took s" >>"$out/summary.txt" ;;
    *) failed+=("$stage"); echo "$stage: FAILED (exit $code) in $took s" >>"$out/summary.txt" ;;
  esac
done

{
  echo "# GPU check, $(date -u +%Y-%m-%d)"
  echo
  for stage in ${stages//,/ }; do
    [ -f "$out/$stage.md" ] && cat "$out/$stage.md" && echo
  done
} >"$out/results.md"
# One archive is easier to carry away than a folder.
tar -czf "$out/all.tar.gz" -C "$out" --exclude=all.tar.gz --exclude=kernel-cache . 2>/dev/null || true

echo
echo "== summary ($((SECONDS - started)) s), tables in $out/results.md"
cat "$out/summary.txt"
if [ "${#failed[@]}" -gt 0 ]; then
  echo "NOT PASSED: ${failed[*]}"
  exit 1
fi
echo "ALL PASSED"
