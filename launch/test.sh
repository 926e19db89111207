#!/usr/bin/env bash
# Lint and test. ./launch/test.sh: all tests that are marked neither extended nor slow; --extended:
# those marked extended; --all: all tests; --oldest: tests marked versions, with the oldest Python
# and packages that pyproject.toml allows; --newest: the same with the newest there are, of jax also
# pre-releases; or a part: ./launch/test.sh tests/schedule -k 1f1b. --cov=jaxpipe reports the lines
# that tests run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "${1:-}" = --oldest ] || [ "${1:-}" = --newest ]; then
    packages_apart "${1#--}"
    export PYTHONPATH=$PWD JAX_COMPILATION_CACHE_DIR=$folder/programs
    export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    exec "$folder/bin/python" -m pytest -m "versions and not slow" -p no:cacheprovider "${@:2}"
fi
extras=(test)
[ "$(uname -s)" = Linux ] && extras+=(aot) # the compiler of GPU programs supports Linux only
prepare "${extras[@]}"
python=.venv/bin/python

# A persistent cache, so that a step that several tests or runs compile is compiled once. A program
# compiled for one processor may crash on another, so each processor has its own cache.
processor=$({ uname -m; grep -m 2 -E '^(model name|flags|Features)' /proc/cpuinfo ||
    sysctl -n machdep.cpu.brand_string; } 2>/dev/null | sort | cksum | cut -d ' ' -f 1)
version=$($python -c 'from importlib.metadata import version; print(version("jaxlib"))')
cache=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/jaxpipe/programs-$version-$processor
mkdir -p "$cache"
find "$cache" -type f -mtime +30 -delete
export JAX_COMPILATION_CACHE_DIR=$cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile all sources

case "${1:-}" in
'') set -- -m 'not extended and not slow' ;;
--extended) set -- -m 'extended and not slow' ;;
--all) shift ;;
*) part=yes ;;
esac
if [ -z "${part:-}" ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
fi
# Each worker takes a run of neighbouring tests, which share fixtures and compiled steps of their
# file; an idle worker takes half of the tests that another has left.
$python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
