#!/usr/bin/env bash
# With a GPU: its tests, op times and training steps at Llama-3 8B's layer sizes. Not yet run on one.
#   ./launch/gpu_report.sh [DIRECTORY]    where the JSON files go (default: jaxpipe/bench/results)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if ! card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1); then
    echo "nvidia-smi finds no GPU here: run this on a machine with one." >&2
    exit 1
fi
prepare test
export JAX_PLATFORMS=cuda
results=${1:-jaxpipe/bench/results}
mkdir -p "$results"
name=$results/$(date +%F)-$(tr ' ' '-' <<<"${card,,}")
config=configs/llama3_8b_layers_1gpu.toml
.venv/bin/python -m pytest -m gpu tests/gpu
.venv/bin/python -m jaxpipe.bench ops "$config" --out "$name-ops.json"
for remat in full selective; do
    .venv/bin/python -m jaxpipe.bench train "$config" "train.remat=$remat" --out "$name-step-$remat.json"
done
