#!/usr/bin/env bash
# Builds the fake driver (tests/fake_driver) in the directory $1. A program takes it with TESSERA_CUDA_LIBS=$1.
set -euo pipefail
directory=$(realpath -m "$1")
cd "$(dirname "$0")/.."
cargo run --quiet -p device_tests --bin gpu_check -- build-fake-driver "$directory"
