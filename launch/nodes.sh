#!/usr/bin/env bash
# tpsample on the ranks of several machines, started by torchrun: the same command on each of them.
#
#   FIRST=node-1 NNODES=2 launch/nodes.sh [--dry-run] [command and options of tpsample]
#
# FIRST   name or address of one of the machines, the same everywhere; with a port, or 29400
# NNODES  machines
# NPROC   ranks on this machine; default 2, or 1 where there is one GPU
# ADDR    address of this machine; default: the one from which it reaches FIRST
# WAIT    seconds to wait until the script runs on FIRST; default 25
# JOB     name that jobs at the same time on the same FIRST must not share; default tpsample
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if $dry_run && [[ -z ${FIRST-}${NNODES-} ]]; then
    note "FIRST and NNODES are not set; node-1 and 2 stand for them"
    FIRST=node-1 NNODES=2
fi
[[ -n ${FIRST-} ]] || fail "FIRST is not set: name one of the machines, the same on all of them"
[[ ${NNODES-} =~ ^[1-9][0-9]*$ ]] || fail "NNODES is '${NNODES-}': expected the number of machines"
[[ $FIRST == *:* ]] || FIRST=$FIRST:29400
port=${FIRST##*:}
[[ $port =~ ^[1-9][0-9]{0,4}$ ]] && ((port < 65536)) ||
    fail "FIRST is '$FIRST': expected a port below 65536 behind the colon, or none"
[[ ${WAIT-25} =~ ^[0-9]+(\.[0-9]+)?$ ]] || fail "WAIT is '$WAIT': expected a number of seconds"

if $dry_run; then
    is_first=0 first=${FIRST%:*} address=${ADDR-10.0.0.2}
else
    found=$(python "$launch_folder/../tpsample/ranks/addresses.py" "$FIRST" "${WAIT-25}" "${ADDR-}" 2>&1) ||
        fail "$found"
    read -r is_first first address <<<"$found"
    if ((is_first)); then note "this machine is the first; waiting for the others at $first"; fi
fi

# torchrun would look at names to find out which machine is the first, and they may mislead.
start torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC" --rdzv-backend c10d \
    --rdzv-id "${JOB-tpsample}" --rdzv-endpoint "$first:$port" \
    --rdzv-conf "is_host=$is_first" --local-addr "$address" -m tpsample.cli "$@"
