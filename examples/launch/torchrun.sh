#!/usr/bin/env bash
# Train on several machines with torchrun. Run the same command on every machine, each with its own NODE_RANK:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=192.168.7.1 IFACE=eth1 examples/launch/torchrun.sh config.yaml
#
# MASTER_ADDR is an address of machine 0, and IFACE the network interface that leads to the other machines. Without
# these variables, the run uses only this machine. The same command continues a run that was interrupted. `output`
# in the config must be a directory that all machines share. Further options go to hydragraph train.
#
# torchrun starts one process per machine, which starts the machine's ranks and replaces those that are lost. With
# PER_MACHINE=8, torchrun itself starts 8 ranks on this machine; machines may then have different numbers of ranks, but
# when one rank is lost, all ranks end and restart from the last checkpoint.
set -euo pipefail

if [ $# -lt 1 ]; then
    echo "usage: torchrun.sh CONFIG | DATA MODEL [options of hydragraph train]" >&2
    exit 2
fi

if [ -n "${IFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME="$IFACE" NCCL_SOCKET_IFNAME="$IFACE"
fi
# torchrun restarts its processes, and hydragraph continues from the last checkpoint: give both the same --max-restarts.
exec "${PYTHON:-python3}" -m torch.distributed.run --nnodes "${NODES:-1}" --node-rank "${NODE_RANK:-0}" \
    --nproc-per-node "${PER_MACHINE:-1}" --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" --max-restarts 3 -m hydragraph train "$@" --auto-resume --max-restarts 3
