#!/usr/bin/env bash
# Text to token ids: ./launch/data.sh prepare INPUT... --tokenizer PATH --out DIR; or inspect DIR
# Paths are relative to the user's working directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare data
cd "$here"
exec "$root/.venv/bin/python" -m jaxpipe.data "$@"
