#!/usr/bin/env bash
# Train on several machines with torchrun. Run the same command on every machine, each with its own NODE_RANK:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=192.168.7.1 IFACE=eth1 examples/launch/torchrun.sh 8 config.yaml    # 8 ranks each
#
# MASTER_ADDR is an address of machine 0, and IFACE the network interface that leads to the other machines. Without
# these variables, the run uses only this machine. The same command continues a run that was interrupted. `output`
# in the config must be a directory that all machines share. Further options go to hydragraph train.
set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: torchrun.sh RANKS_PER_MACHINE CONFIG | DATA MODEL [options of hydragraph train]" >&2
    exit 2
fi
per_node="$1"
shift

if [ -n "${IFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$IFACE" NCCL_SOCKET_IFNAME="$IFACE"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torchrun restarts the ranks, and hydragraph continues from the last checkpoint: give both the same --max-restarts.
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "$per_node" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    --max-restarts 3 -m hydragraph train "$@" --auto-resume --max-restarts 3
