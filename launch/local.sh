#!/usr/bin/env bash
# tpsample on the ranks of this machine, started by torchrun.
#
#   launch/local.sh [--dry-run] [command and options of tpsample; default: generate]
#
# NPROC  ranks; default 2, or 1 where there is one GPU.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# torchrun would give every rank a single thread, whatever the machine has.
cores=$(nproc)
threads=${OMP_NUM_THREADS-$((cores > NPROC ? cores / NPROC : 1))}

# --local-addr: without it torchrun waits for ever on a machine that cannot resolve its own name.
start env OMP_NUM_THREADS="$threads" \
    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node "$NPROC" -m tpsample.cli "$@"
