#!/usr/bin/env bash
# The preStop hook of a pod that runs train_start.sh: asks torchrun to end, and returns when it has.
#
# Where TASKD_RECOVER_STRATEGY allows a dump, the ranks finish their step and the job is saved in this time. TASKD_GRACE_S limits it and
# has to be less than the pod's terminationGracePeriodSeconds, after which Kubernetes kills this hook and the training.
#
# PID_FILE is that of train_start.sh.
set -euo pipefail

PID_FILE="${PID_FILE:-/tmp/torchrun.pid}"
training="$(cat "${PID_FILE}" 2>/dev/null || true)"
# The file may be an old one, and its number another process by now: ours has the environment of a taskd job.
if [[ ! "${training}" =~ ^[0-9]+$ ]] || ! grep -qzx "TASKD_PROCESS_ENABLE=on" "/proc/${training}/environ" 2>/dev/null; then
    echo "pre_stop: no training runs here (${PID_FILE})"
    exit 0
fi
echo "pre_stop: SIGTERM to torchrun (pid ${training})"
kill -TERM "${training}" 2>/dev/null || true
tail --pid="${training}" --sleep-interval=0.2 -f /dev/null
echo "pre_stop: torchrun has ended"
