#!/usr/bin/env bash
# Compares planned memory with the operating system's figures over a grid of settings, as a table for benches/RESULTS.md.
# usage: scripts/memory-truth.sh [DIRECTORY] [FILTER]
# DIRECTORY needs about 4 GB on a disk with direct I/O (default: target/memory-truth). FILTER is text that the flags of a
# row must contain.
set -euo pipefail
cd "$(dirname "$0")/.."
target="${CARGO_TARGET_DIR:-target}"
cargo build --release -p launcher -p tests --bins
"$target/release/memory_truth" "$target/release/launcher" "${1:-$target/memory-truth}" "${2:-}"
