#!/usr/bin/env bash
# Builds what scripts/gpu-check.sh needs on a machine with a GPU into BIN_DIR: three programs, and the emulated kernels
# for the calibration. Nothing else is needed there but a driver; Python with torch is used when it is there.
# usage: scripts/gpu-build.sh BIN_DIR
set -euo pipefail
bin=$(realpath -m "${1:?usage: scripts/gpu-build.sh BIN_DIR}")
cd "$(dirname "$0")/.."
mkdir -p "$bin"
cargo build --release -p device_tests --bin gpu_check
cargo build --release -p launcher --bin launcher
cargo build --release -p tests --bin parity
for program in gpu_check launcher parity; do
  install -m 755 "${CARGO_TARGET_DIR:-target}/release/$program" "$bin/$program"
  strip "$bin/$program"
done
"$bin/gpu_check" build-emulated "$bin/emulated"
strip --strip-unneeded "$bin"/emulated/*.so
mib=$(du -sm "$bin" | cut -f1)
echo "$bin: $mib MiB"
[ "$mib" -le 60 ] || { echo "more than the 60 MiB that are meant to be carried" >&2; exit 1; }
