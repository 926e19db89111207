#!/usr/bin/env bash
# Check on virtual CPU devices that settings compute the right numbers: ./launch/verify.sh CONFIG [section.key=value ...]
# Paths are relative to the user's working directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$here"
exec "$root/.venv/bin/python" -m jaxpipe.verify "$@"
