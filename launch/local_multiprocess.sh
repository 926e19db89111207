#!/usr/bin/env bash
# Train with N processes of this machine: ./launch/local_multiprocess.sh N CONFIG [section.key=value ...]
#
# runtime.cpu_devices is what each of them has; the mesh spans all. When one process ends with an
# error the others are stopped, and its exit code is returned.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
count=$1
shift
free_port='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
export JAX_COORDINATOR_ADDRESS="localhost:$(.venv/bin/python -c "$free_port")"
export JAX_NUM_PROCESSES=$count
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
trap 'kill -USR1 $(jobs -p) 2>/dev/null || true' USR1
trap 'kill -TERM $(jobs -p) 2>/dev/null || true' TERM
for ((index = 0; index < count; index++)); do
    JAX_PROCESS_ID=$index .venv/bin/python -m jaxpipe.train "$@" &
done
code=0
for ((left = count; left > 0; left--)); do
    wait -n || { code=$?; break; }
done
exit "$code"
