# Sourced by the launch scripts: finds a Python and keeps .venv up to date with pyproject.toml.
# JAXPIPE_PYTHON names the Python to use instead of the newest one found.
#
# Changes to the root of the repository. Scripts that run a user's command change back to $here
# first, so that paths (configuration, data, run.dir) are relative to the user's working directory.
here=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD

usable_version() { # prints "3.12.1" if the given command is a Python that jaxpipe can use
    "$1" - 2>/dev/null <<'PYTHON'
import sys, venv, ensurepip
if (3, 11) <= sys.version_info[:2] <= (3, 13):
    print(".".join(map(str, sys.version_info[:3])))
PYTHON
}

newest_python() {
    local candidate version
    for candidate in python3.13 python3.12 python3.11 python3 \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[1-3]*/bin/python; do
        version=$(usable_version "$candidate") || continue
        [ -n "$version" ] && echo "$version $candidate"
    done | sort -t. -k1,1n -k2,2n -k3,3n | tail -n 1
}

prepare() { # prepare EXTRA...: install jaxpipe into .venv with these extras and those it has already
    local python version
    command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 && set -- "$@" cuda13
    # If .venv is ready, nothing is written: the checkout may be read-only or another user's.
    version=$(usable_version "${JAXPIPE_PYTHON:-.venv/bin/python}") || true
    if is_made_for "$version" && is_installed "$@"; then return; fi
    if ! { exec 9>>.venv.lock; } 2>/dev/null; then
        echo "error: .venv has to be made or changed, but you cannot write in $PWD: let its owner" \
            "run this command, or use a checkout of your own." >&2
        exit 1
    fi
    if command -v flock >/dev/null; then flock 9; fi
    if [ -e .venv ] && [ ! -e .venv/made-for ]; then # the user created it: keep its packages
        if [ -z "$version" ] || [ "$(usable_version .venv/bin/python)" != "$version" ] ||
            ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
            echo "error: .venv is not jaxpipe's, and lacks pip or Python ${version:-3.11 to 3.13}:" \
                "move it away." >&2
            exit 1
        fi
        echo "$version $PWD" >.venv/made-for
    fi
    if ! is_made_for "$version"; then
        if [ -n "${JAXPIPE_PYTHON:-}" ]; then
            python=$JAXPIPE_PYTHON
        else
            read -r version python <<<"$(newest_python)" || true
        fi
        if [ -z "${version:-}" ]; then
            echo "jaxpipe needs Python 3.11, 3.12 or 3.13 with venv;" \
                "found none in ${JAXPIPE_PYTHON:-PATH and pyenv}: install one or set" \
                "JAXPIPE_PYTHON." >&2
            exit 1
        fi
        echo "jaxpipe: making .venv with Python $version"
        rm -rf .venv
        mkdir .venv
        : >.venv/made-for # so that it is known as jaxpipe's if this is interrupted
        "$python" -m venv .venv
        echo "$version $PWD" >.venv/made-for
    fi
    if ! is_installed "$@"; then install "$@"; fi
    exec 9>&-
}

is_made_for() { # is_made_for VERSION: whether .venv has this Python and was created at this path
    [ -n "$1" ] && [ -x .venv/bin/python ] && [ "$(cat .venv/made-for 2>/dev/null)" = "$1 $PWD" ]
}

wanted() { # wanted EXTRA...: pyproject.toml's checksum, then these extras and .venv's, one per line
    cksum <pyproject.toml
    printf '%s\n' "$@" "$(tail -n +2 .venv/installed 2>/dev/null)" | sed '/^$/d' | sort -u
}

is_installed() { # is_installed EXTRA...: whether .venv has the packages
    [ "$(wanted "$@")" = "$(cat .venv/installed 2>/dev/null)" ]
}

install() { # install EXTRA...
    local want extras
    want=$(wanted "$@")
    extras=$(tail -n +2 <<<"$want")
    echo "jaxpipe: installing the packages" ${extras:+and extras $extras}
    # PIP_USER=1, which some clusters set, fails in a .venv.
    if ! PIP_USER=0 .venv/bin/python -m pip install --disable-pip-version-check \
        --editable ".${extras:+[$(paste -sd, - <<<"$extras")]}" | shown_in_dots; then
        echo "error: pip could not install the packages. Without internet, set PIP_INDEX_URL to a" \
            "mirror, or PIP_NO_INDEX=1 and PIP_FIND_LINKS to a directory that has the wheels," \
            "setuptools too." >&2
        exit 1
    fi
    echo "$want" >.venv/installed
}

shown_in_dots() { # print a dot for every package that pip collects, and a word for its last step
    local line
    while IFS= read -r line; do
        case $line in
        Collecting*) printf . ;;
        'Installing collected'*) printf ' unpacking them' ;;
        esac
    done
    echo
}

packages_apart() { # packages_apart oldest|newest|outside: sets `folder` to an environment with them
    local which=$1 python pins candidate
    if [ "$which" != newest ]; then
        for candidate in python3.11 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.11*/bin/python; do
            case "$(usable_version "$candidate")" in 3.11.*) python=$candidate ;; esac
        done
    else
        read -r _ python <<<"$(newest_python)" || true
    fi
    if [ -z "${python:-}" ]; then
        echo "the $which packages are tested with the $which Python that jaxpipe supports: install" \
            "it, in PATH or pyenv." >&2
        exit 1
    fi
    pins=$("$python" tests/support/versions.py "$which")
    folder=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/jaxpipe/$which
    if [ "$(cat "$folder/complete" 2>/dev/null)" != "$pins $(date +%G-%V)" ]; then # made every week
        echo "jaxpipe: installing the $which packages"
        rm -rf "$folder"
        "$python" -m venv "$folder"
        if [ "$which" = outside ]; then # without CUDA, if PIP_FIND_LINKS has it: with it 6 GB
            "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-index \
                --no-deps torch 2>/dev/null || true
        fi
        # shellcheck disable=SC2086
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
            $pins chex pytest pytest-timeout pytest-xdist hypothesis
        echo "$pins $(date +%G-%V)" >"$folder/complete"
    fi
}
