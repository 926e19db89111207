#!/usr/bin/env bash
# Choose a schedule, without any device: ./launch/plan.sh CONFIG [section.key=value ...] [--memory 80GiB ...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
exec .venv/bin/python -m jaxpipe.plan "$@"
