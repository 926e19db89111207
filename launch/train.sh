#!/usr/bin/env bash
# Train: ./launch/train.sh CONFIG [section.key=value ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
exec .venv/bin/python -m jaxpipe.train "$@"
