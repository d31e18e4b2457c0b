#!/usr/bin/env bash
# Starts one node of a job: train_start.sh train.py [arguments of train.py]
#
# From the pod: RANK (of this node), POD_IP (its address), MASTER_ADDR, MASTER_PORT, MINDX_TASK_ID.
# Settings:
#   NNODES, GPUS_PER_NODE   size of the job, 1 and 1 if not given
#   MAX_RESTARTS            faults that may be recovered, 32767 if not given
#   LAUNCHER                torchrun; with an unpatched torch use "python3 -m taskd.run"
#   MANAGER                 manager.py, in the current directory: node 0 starts it
#   TASKD_MANAGER_ADDR      where the manager is, if somebody else starts it
#   PRELOAD_LIBTASKD        on: libtaskd.so is loaded into every process of the training
#   PID_FILE                where pre_stop.sh finds torchrun, /tmp/torchrun.pid; one for each job where several share a machine
set -euo pipefail

NODE_RANK="${RANK:-0}"
NNODES="${NNODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-1}"
export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
export MASTER_PORT="${MASTER_PORT:-2222}"
export TASKD_PROCESS_ENABLE="on"

manager=""
if [[ "${NODE_RANK}" == 0 && -z "${TASKD_MANAGER_ADDR:-}" ]]; then
    if ((NNODES > 1)); then
        : "${POD_IP:?is needed on the first of several nodes: the manager listens there}"
    fi
    export MASTER_ADDR="${POD_IP:-${MASTER_ADDR}}"
    python3 "${MANAGER:-manager.py}" --nnodes "${NNODES}" --nproc-per-node "${GPUS_PER_NODE}" &
    manager=$!
fi

if [[ "${PRELOAD_LIBTASKD:-off}" == on ]]; then
    location="$(python3 -c 'import pathlib, taskd; print(pathlib.Path(taskd.__file__).parent)')"
    export LD_PRELOAD="${location}/python/cython_api/libs/libtaskd.so${LD_PRELOAD:+:${LD_PRELOAD}}"
fi

DISTRIBUTED_ARGS="--nproc_per_node ${GPUS_PER_NODE} --nnodes ${NNODES} --node_rank ${NODE_RANK} \
    --master_addr ${MASTER_ADDR} --master_port ${MASTER_PORT} --max_restarts ${MAX_RESTARTS:-32767}"
# shellcheck disable=SC2086  # both are lists of words
${LAUNCHER:-torchrun} ${DISTRIBUTED_ARGS} "$@" &
training=$!
PID_FILE="${PID_FILE:-/tmp/torchrun.pid}"
echo "${training}" > "${PID_FILE}" || echo "train_start: without this file pre_stop.sh does not find torchrun" >&2

# As the first process of a container, bash gets the SIGTERM of an eviction and must hand it on.
patience=60
trap 'patience=5; kill -TERM "${training}" 2>/dev/null || true' TERM INT
status=0
wait "${training}" || status=$?
while kill -0 "${training}" 2>/dev/null; do      # wait was ended by a signal: torchrun is still stopping its workers
    status=0
    wait "${training}" || status=$?
done
rm -f "${PID_FILE}"

# The manager ends with the job. If torchrun never came so far as to join it, it would wait for minutes; and a pod that is to end has no minute.
if [[ -n "${manager}" ]]; then
    timeout "${patience}" tail --pid="${manager}" -f /dev/null || kill -TERM "${manager}" 2>/dev/null || true
    wait "${manager}" || true
fi
exit "${status}"
