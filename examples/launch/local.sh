#!/usr/bin/env bash
# Train with several processes on this machine, one per device:
#
#     examples/launch/local.sh 4 config.yaml          # four ranks
#     examples/launch/local.sh 4 DATA MODEL           # the same; hydragraph writes a config for the data and the model
#
# The same command continues a run that was interrupted. Further options go to hydragraph train.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: local.sh RANKS CONFIG | DATA MODEL [options of hydragraph train]" >&2
    exit 2
fi
ranks="$1"
shift

# After a rank fails, the run restarts from the last checkpoint, up to three times. On CPUs, set OMP_NUM_THREADS to the
# number of cores per rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m hydragraph train "$@" --set "ranks=$ranks" --auto-resume --max-restarts 3
