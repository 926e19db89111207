#!/usr/bin/env bash
# Text to token ids: ./launch/data.sh prepare INPUT... --tokenizer PATH --out DIR; or inspect DIR
# Paths are meant from where the user stands.
set -euo pipefail
here=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh" ""
prepare data
python=$PWD/.venv/bin/python
cd "$here"
exec "$python" -m jaxpipe.data "$@"
