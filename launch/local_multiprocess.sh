#!/usr/bin/env bash
# Train with N processes on this machine: ./launch/local_multiprocess.sh N CONFIG [section.key=value ...]
#
# runtime.cpu_devices is the number of devices per process; the mesh spans all processes. When one
# dies (the others exit with 3) or the run hangs (5), the others exit by themselves; what still runs
# JAXPIPE_GRACE seconds later (30 by default), such as a stopped process, is killed. The exit code is
# 0 if that of every process is 0.
set -euo pipefail
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ && -n ${2:-} ]]; then
    echo "usage: ./launch/local_multiprocess.sh N CONFIG [section.key=value ...]" >&2
    exit 2
fi
count=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$here"
python=$root/.venv/bin/python
free_port='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
export JAX_COORDINATOR_ADDRESS="localhost:$("$python" -c "$free_port")"
export JAX_NUM_PROCESSES=$count
pids=()
for ((index = 0; index < count; index++)); do
    JAX_PROCESS_ID=$index "$python" -m jaxpipe.train "$@" &
    pids+=($!)
done
for name in HUP INT TERM USR1; do
    trap "kill -$name \${pids[*]} 2>/dev/null || :" "$name"  # each finishes its step, saves and ends
done
codes=() deadline=
while [ ${#pids[@]} -gt 0 ]; do
    for index in "${!pids[@]}"; do
        kill -0 "${pids[index]}" 2>/dev/null && continue
        status=0
        wait "${pids[index]}" || status=$?
        unset "pids[index]"
        [ "$status" = 0 ] || codes[index]=$status
        case $status in 3 | 5) deadline=${deadline:-$((SECONDS + ${JAXPIPE_GRACE:-30}))} ;; esac
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ ${#pids[@]} -gt 0 ]; then
        kill -KILL "${pids[@]}" 2>/dev/null || true
        break
    fi
    sleep 0.1
done
for status in "${codes[@]:-0}"; do code=$status; done
exit "$code"
