#!/usr/bin/env bash
# The plan beside the kernel's figures over a grid of settings, as a table for benches/RESULTS.md.
# scripts/memory-truth.sh [FOLDER] [FILTER]: a folder with about 4 GB of room on a disk with direct I/O
# (default target/memory-truth), and words that the flags of a cell must contain.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
cargo build --release -p launcher -p tests --bins
"$target/release/memory_truth" "$target/release/launcher" "${1:-$target/memory-truth}" "${2:-}"
