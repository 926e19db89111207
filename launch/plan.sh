#!/usr/bin/env bash
# Choose a schedule, without any device: ./launch/plan.sh CONFIG [section.key=value ...] [--memory 80GiB ...]
# Paths are relative to the user's working directory.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare pictures
cd "$here"
exec "$root/.venv/bin/python" -m jaxpipe.plan "$@"
