#!/usr/bin/env bash
# One run on several machines: start this on each of them, with the same MASTER_ADDR and RUN_ID.
#
#     MASTER_ADDR=node-0 NNODES=4 NPROC=8 bash launch_scripts/run_torchrun.sh FILE [key.path=value ...]
#
# MASTER_ADDR: name or address of one of the machines (that one hosts the rendezvous), IPv6 in square brackets.
# MASTER_PORT: default 29400. NNODES: number of machines. NPROC: ranks per machine; default: one per GPU, or 1.
# RUN_ID: any word, the same on all machines; default: grpo. PYTHON: as in run_local.sh.
# RDZV_TIMEOUT_SECONDS: how long a machine waits for the others; default 600.
# Signals and exit codes: as in run_local.sh, per machine.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/common.sh"
check_counts

[[ $# -ge 1 && $1 != -h && $1 != --help ]] || usage "${BASH_SOURCE[0]}"
for name in MASTER_ADDR NNODES; do
    [[ -n ${!name:-} ]] || { echo "error: set $name (bash ${BASH_SOURCE[0]} --help says how)" >&2; exit 2; }
done
exec "$python" "$here/launch.py" --nnodes "$NNODES" --nproc-per-node "${NPROC:-$(default_ranks)}" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" --rdzv-id "${RUN_ID:-grpo}" \
    --rdzv-conf "join_timeout=${RDZV_TIMEOUT_SECONDS:-600}" -m "$trainer" "$@"
