#!/usr/bin/env bash
# Train: ./launch/train.sh CONFIG [section.key=value ...]
# Paths are meant from where the user stands.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$here"
exec "$root/.venv/bin/python" -m jaxpipe.train "$@"
