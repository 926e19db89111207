"""A checkout of the launch scripts with a fake Python that only prints its arguments."""

import subprocess
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
# Has the version in $VERSION; creates an environment that contains itself; reports pip's arguments
# on stderr; its processes exit with the codes in $CODES, or never, or run $STAND_IN.
PYTHON = """#!/usr/bin/env bash
case "$*" in
-) [ -z "$VERSION" ] || echo "$VERSION" ;;
-m\\ venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
-c*) echo 29500 ;;
-m\\ pip*) [ -z "${NO_NETWORK:-}" ] || exit 1
    printf '%s\\n' 'Collecting one' '  Downloading one' 'Collecting two' && echo "$*" >&2 ;;
*) echo "$PWD: ${JAX_PROCESS_ID:-} $*"
    [ -n "${JAX_PROCESS_ID:-}" ] || exit 0
    code=$(cut -d ' ' -f $((JAX_PROCESS_ID + 1)) <<<"$CODES")
    [ "$code" != never ] || kill -STOP $$
    [ "$code" != stand-in ] || exec $STAND_IN
    exit "$code" ;;
esac
"""


def run(tree, script, *arguments, cwd=None, user=None, **environment):
    own = {
        "JAXPIPE_PYTHON": str(tree.parent / "python"),
        "VERSION": "3.12.1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        [tree / "launch" / script, *arguments], cwd=cwd or tree, text=True, check=False,
        capture_output=True, env=own | environment, **(user or {}),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
