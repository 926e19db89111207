#!/usr/bin/env bash
# Continue a text with a trained model: ./launch/generate.sh MODEL --prompt TEXT [section.key=value ...]
# Paths are relative to the user's working directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$here"
exec "$root/.venv/bin/python" -m jaxpipe.generate "$@"
