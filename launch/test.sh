#!/usr/bin/env bash
# Lint and test everything: ./launch/test.sh; or a part: ./launch/test.sh tests/schedule -k 1f1b
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
extras=(test)
[ "$(uname -s)" = Linux ] && extras+=(aot) # the compiler of GPU programs is made for Linux only
prepare "${extras[@]}"
if [ $# -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
fi
# A step that several tests compile, in this process or another, is compiled once.
cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
export JAX_COMPILATION_CACHE_DIR=$cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
# Each worker takes a run of neighbouring tests, which share what their file makes; one that is
# done takes half of what another has left.
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
