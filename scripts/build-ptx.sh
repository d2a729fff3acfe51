#!/usr/bin/env bash
# Builds the PTX that is used where NVRTC is missing (kernels/src/cuda/ptx/sm_80.bundle), from the kernel sources.
# Uses NVRTC of CUDA 12.2, so that every supported driver reads the result. Needs Python's pip and lzma.
# Modules whose sources did not change keep their PTX; `: > kernels/src/cuda/ptx/sm_80.bundle` before it builds all anew.
set -euo pipefail
cd "$(dirname "$0")/.."
tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m pip install --quiet --no-deps --target "$tool" nvidia-cuda-nvrtc-cu12==12.2.140
cargo run --release -q -p device_tests --bin gpu_check -- \
  --libraries "$tool/nvidia/cuda_nvrtc/lib" build-ptx "$tool/records"
python3 - "$tool/records" kernels/src/cuda/ptx/sm_80.bundle <<'END'
import lzma, os, sys
records, bundle = sys.argv[1:]
with open(records, "rb") as file:
    packed = lzma.compress(file.read(), check=lzma.CHECK_CRC32)
with open(bundle + ".partial", "wb") as file:
    file.write(packed)
os.replace(bundle + ".partial", bundle)
print(f"{len(packed)} bytes in {bundle}")
END
