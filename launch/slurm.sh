#!/usr/bin/env bash
# tpsample on the nodes of a Slurm allocation, started by srun.
#
#   salloc --nodes 2 --gpus-per-node 8 launch/slurm.sh [--dry-run] [command and options of tpsample]
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh generate      # from the root of the checkout
#
# NPROC  ranks per node; default: the allocation's tasks or GPUs per node, else 1
# PORT   free port of the first node, where the ranks meet; default from the job's number
set -euo pipefail
folder=$(dirname "${BASH_SOURCE[0]}")
# sbatch runs a copy of this file.
if [[ ! -e $folder/common.sh ]]; then folder=${SLURM_SUBMIT_DIR-.}/launch; fi
# What Slurm allocated; typed GPUs come as h200:8, tasks as 8(x2).
per_node=${SLURM_NTASKS_PER_NODE-${SLURM_GPUS_ON_NODE-${SLURM_GPUS_PER_NODE-1}}}
per_node=${per_node##*:}
NPROC=${NPROC:-${per_node%%(*}}
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$folder/common.sh"

if [[ -n ${SLURM_JOB_NODELIST-} ]]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    [[ -n $first ]] || fail "scontrol does not tell the nodes of $SLURM_JOB_NODELIST"
elif $dry_run; then
    note "not in an allocation; node-1 stands for its first node"
    first=node-1
else
    fail "not in an allocation; start it with salloc or sbatch"
fi

# --kill-on-bad-exit: a rank that fails ends the job instead of leaving the others waiting.
start env MASTER_ADDR="$first" MASTER_PORT="${PORT:-$((20000 + ${SLURM_JOB_ID-0} % 10000))}" \
    srun --ntasks-per-node "$NPROC" --kill-on-bad-exit=1 python -m tpsample.cli "$@"
