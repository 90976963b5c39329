# Sourced by the launchers: the environment of the checkout, --dry-run, NPROC, and `start`.
# shellcheck shell=bash

launch_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH="${launch_folder%/*}/.venv/bin:$PATH"

dry_run=false
if [[ ${1-} == --dry-run ]]; then
    dry_run=true
    shift
fi
if (($# == 0)); then set -- generate; fi

gpus=$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)
NPROC=${NPROC:-$((gpus == 1 ? 1 : 2))}

# Say something.
note() { echo "${0##*/}: $1" >&2; }

# Say why nothing is started.
fail() {
    note "$1"
    exit 1
}

[[ $NPROC =~ ^[1-9][0-9]*$ ]] || fail "NPROC is '$NPROC': expected a number of ranks, from 1"

# Show a command, then become it.
start() {
    printf '%q ' "$@" >&2
    echo >&2
    if ! $dry_run; then exec "$@"; fi
}
