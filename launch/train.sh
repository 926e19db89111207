#!/usr/bin/env bash
# Train: ./launch/train.sh CONFIG [section.key=value ...]
set -euo pipefail
case "${1:-}" in
'' | -*) ;;
*) if [ -e "$1" ]; then set -- "$(cd "$(dirname "$1")" && pwd)/$(basename "$1")" "${@:2}"; fi ;;
esac
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
exec .venv/bin/python -m jaxpipe.train "$@"
