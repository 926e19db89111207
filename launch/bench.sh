#!/usr/bin/env bash
# Measure: ./launch/bench.sh WHAT ..., for example step configs/bench_s.toml --torch PYTHON; or --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
exec .venv/bin/python -m jaxpipe.bench "$@"
