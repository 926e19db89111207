#!/usr/bin/env bash
# Measure: ./launch/bench.sh WHAT ..., for example step configs/bench_s.toml --torch PYTHON; or --help
# Paths are relative to the user's working directory; those of a report, to the repository's root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
[ "${1:-}" = report ] || cd "$here" # a report measures configurations of the repository
exec "$root/.venv/bin/python" -m jaxpipe.bench "$@"
