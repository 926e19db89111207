#!/usr/bin/env bash
# Train with N processes on this machine: ./launch/local_multiprocess.sh [--restart] N CONFIG [section.key=value ...]
#
# It is for CPUs: runtime.cpu_devices is the number of devices per process; the mesh spans all
# processes. On GPUs every process would claim all of them; ./launch/train.sh uses them all in one.
#
# When a process dies (the others exit with 3) or the run hangs (5), the others exit by themselves;
# what still runs JAXPIPE_GRACE seconds later (30 by default), such as a stopped process, is killed.
# The exit code is 0 if that of every process is 0. With --restart the processes that are left start
# again after some were killed, as a cluster restarts a run without the nodes that it lost
# (runtime.min_devices).
set -euo pipefail
restart=
if [ "${1:-}" = --restart ]; then
    restart=yes
    shift
fi
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ && -n ${2:-} ]]; then
    echo "usage: ./launch/local_multiprocess.sh [--restart] N CONFIG [section.key=value ...]" >&2
    exit 2
fi
count=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare
cd "$here"
python=$root/.venv/bin/python
free_port='import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'

run_processes() { # run_processes CONFIG ...: sets `codes`, exit codes other than 0, and `killed`
    export JAX_COORDINATOR_ADDRESS="localhost:$("$python" -c "$free_port")"
    export JAX_NUM_PROCESSES=$count
    pids=() codes=() killed=0
    local index status deadline=
    for ((index = 0; index < count; index++)); do
        JAX_PROCESS_ID=$index "$python" -m jaxpipe.train "$@" &
        pids+=($!)
    done
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
            killed=${#pids[@]}
            break
        fi
        sleep 0.1 || :  # a signal to the process group, such as Ctrl-C, ends it too
    done
}

count_gone() { # prints how many processes were killed; 0 if one ended for a reason of its own
    local status gone=$killed
    for status in "${codes[@]:-0}"; do
        case $status in
        0 | 3 | 5) ;;
        129 | 130 | 138 | 143) gone=0 && break ;; # it has saved after a signal of those below
        *)
            if [ "$status" -lt 128 ]; then gone=0 && break; fi
            gone=$((gone + 1))
            ;;
        esac
    done
    echo "$gone"
}

# A process that gets one of these finishes its step, saves and ends. INT is passed on as TERM: the
# terminal has sent INT to the processes too, of which a second interrupts, and which they ignore
# until they train.
pids=()
for name in HUP INT TERM USR1; do
    trap "kill -${name/INT/TERM} \${pids[*]} 2>/dev/null || :" "$name"
done
run_processes "$@"
while [ -n "$restart" ]; do
    gone=$(count_gone)
    if [ "$gone" = 0 ] || [ "$gone" = "$count" ]; then break; fi
    count=$((count - gone))
    echo "jaxpipe: $gone processes were killed; the other $count start again"
    run_processes "$@"
done
for status in "${codes[@]:-0}"; do code=$status; done
exit "$code"
