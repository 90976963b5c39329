#!/usr/bin/env bash
# tpsample on the ranks of this machine, or of those in a host file, started by mpirun (Open MPI or
# MPICH).
#
#   launch/mpi.sh [--dry-run] [command and options of tpsample; default: generate]
#
# NPROC     ranks in all; default 2, or 1 where there is one GPU.
# HOSTFILE  names the machines, one per line; default: this one alone.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if ! version=$(mpirun --version 2>&1); then
    fail "mpirun does not run; pip install '.[mpi]' here, or install an MPI of your own"
fi
options=(-np "$NPROC")
if [[ $version == *"Open MPI"* ]]; then
    # MPI starts the processes and carries no tensors: the plainest transport does. tpsample shares
    # out the cores itself.
    export OMPI_MCA_pml=${OMPI_MCA_pml-ob1} OMPI_MCA_osc=${OMPI_MCA_osc-^ucx}
    options+=(--oversubscribe --bind-to none)
    # ssh brings neither to another machine.
    options+=(-x PATH)
    if [[ -n ${PYTHONPATH-} ]]; then options+=(-x PYTHONPATH); fi
    if [[ -n ${HOSTFILE-} ]]; then options+=(--hostfile "$HOSTFILE"); fi
    # It gives rank 0 a terminal even where the output goes to a file; moving bars do not belong there.
    if [[ ! -t 1 ]]; then export TERM=dumb; fi
    if ((EUID == 0)); then options+=(--allow-run-as-root); fi
elif [[ -n ${HOSTFILE-} ]]; then
    options+=(-f "$HOSTFILE")
fi

# -m mpi4py: a rank that fails ends the job instead of leaving the others waiting.
start mpirun "${options[@]}" python -m mpi4py -m tpsample.cli "$@"
