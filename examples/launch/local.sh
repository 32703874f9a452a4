#!/usr/bin/env bash
# Train with several processes of this machine, one for each device:
#
#     examples/launch/local.sh 4 config.yaml          # four ranks
#     examples/launch/local.sh 4 DATA MODEL           # the same, with a config that is written for data and a model
#
# The same command continues a run that was interrupted. Further options go to hydragraph train.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: local.sh RANKS CONFIG | DATA MODEL [options of hydragraph train]" >&2
    exit 2
fi
ranks="$1"
shift

# The run restarts from the last checkpoint up to three times after a rank fails. OMP_NUM_THREADS: cores of a CPU rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python3}" -m hydragraph train "$@" --set "ranks=$ranks" --auto-resume --max-restarts 3
