#!/usr/bin/env bash
# Lint and test. ./launch/test.sh: all tests that are marked neither extended nor slow; --core: those
# in tests/core; --near FILE...: those that can reach the files by imports, nearest first, for one
# minute; --extended: those marked extended; --all: all tests; --oldest: tests marked versions, with
# the oldest Python and packages that pyproject.toml allows; --newest: the same with the newest there
# are, of jax also pre-releases; --outside: those that compare with torch, transformers and peft,
# installed apart; or a part: ./launch/test.sh tests/schedules -k 1f1b. --cov=jaxpipe reports the
# lines that tests run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case "${1:-}" in
--oldest | --newest | --outside)
    packages_apart "${1#--}"
    export PYTHONPATH=$PWD JAX_COMPILATION_CACHE_DIR=$folder/programs
    export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
    tests=(-m 'versions and not slow')
    if [ "$1" = --outside ]; then
        packages='importorskip\("(torch|transformers|peft)"'
        # shellcheck disable=SC2207 # a word for each file
        tests=($(grep -rlE --include 'test_*.py' "$packages" tests/*/))
        tests+=(-m 'not slow' -n auto --maxprocesses 4 --dist worksteal)
    fi
    exec "$folder/bin/python" -m pytest -p no:cacheprovider "${tests[@]}" "${@:2}"
    ;;
esac
case "$(uname -s) ${1:-}" in
'Linux --extended' | 'Linux --all') prepare test aot ;; # the compiler of GPU programs has 1.3 GB
*) prepare test ;;
esac
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

lint() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
}
short='not extended and not slow'
case "${1:-}" in
'') lint; set -- -m "$short" ;;
--extended) lint; set -- -m 'extended and not slow' ;;
--all) lint; shift ;;
--core) set -- -m "$short" tests/core "${@:2}" ;;
--near)
    near=$($python tests/support/near.py "${@:2}")
    # shellcheck disable=SC2086 # a word for each file
    set -- -m "$short" --dist load --maxschedchunk 2 -x --session-timeout 60 $near
    ;;
esac
# Each worker takes a run of neighbouring tests, which share fixtures and compiled steps of their
# file; an idle worker takes half of the tests that another has left.
$python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
