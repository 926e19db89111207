#!/usr/bin/env bash
# Every measurement for one GPU, most valuable first:
# correctness, ops, steps, experts, packed and long rows. Needs Python 3.11 to 3.13 and a driver.
#   ./launch/gpu_report.sh [--minutes 30] [--items NAME ...]    # into jaxpipe/lab/bench/results/gpu.json
#   ./launch/gpu_report.sh --cpu --out /tmp/report.json         # tiny sizes, to try the report
# Results are kept if it is interrupted; the same command continues.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
least=580 # the driver that CUDA 13 needs
case " $* " in
*' --cpu '*) export JAX_PLATFORMS=cpu ;;
*)
    if ! driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null); then
        echo "nvidia-smi finds no GPU here: run this on a machine with one, or try it with --cpu." >&2
        exit 1
    fi
    if [ "${driver%%.*}" -lt $least ]; then
        echo "the driver ${driver%%$'\n'*} is too old for CUDA 13: install $least or later." >&2
        exit 1
    fi
    export JAX_PLATFORMS=cuda
    set -- --out jaxpipe/lab/bench/results/gpu.json "$@" # another --out takes its place
    ;;
esac
prepare test
exec .venv/bin/python -m jaxpipe.bench report "$@"
