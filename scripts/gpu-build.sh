#!/usr/bin/env bash
# Builds what scripts/gpu-check.sh needs on a machine with a GPU: three programs, and the emulated kernels for the
# calibration. Writes BIN_DIR, and BIN_DIR.tar.xz with the same content. The machine needs a driver, and Python to unpack
# the archive. PyTorch is used if it is installed.
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
tar -cJf "$bin.tar.xz" -C "$bin" .
mib=$(du -sm "$bin.tar.xz" | cut -f1)
echo "$bin: $(du -sm "$bin" | cut -f1) MiB, packed $mib MiB"
# The archive and the repository together must fit into 64 MiB.
[ "$mib" -le 30 ] || { echo "the archive is larger than 30 MiB" >&2; exit 1; }
