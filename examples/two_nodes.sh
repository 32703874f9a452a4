#!/usr/bin/env bash
# Train on two simulated machines; --help explains the options.
set -euo pipefail

usage() {
    cat <<'EOF'
Simulate two machines as network namespaces of this machine with a link between them, and train with a torchrun in each.

    sudo examples/two_nodes.sh [--rate MBIT] [--per-node N] [--config FILE] [-- OPTIONS OF hydragraph train]

    --rate MBIT    limit the link to this number of Mbit/s (default: no limit)
    --per-node N   ranks per simulated machine (default 2: examples/demo.yaml has strategies for 4 ranks)
    --config FILE  config of the run (default examples/demo.yaml)

Options after -- are passed to hydragraph train; the default is --overwrite --set output=runs/two_nodes --set steps=20.
During the run, disconnect the link for 3 s in another terminal, and read what both sides report:

    sudo ip -n hydragraph1 link set link1 down; sleep 3; sudo ip -n hydragraph1 link set link1 up

PYTHON names the interpreter (default: .venv/bin/python if it exists, else python3). The script needs root, ip and, for
--rate, tc (iproute2). At the end, it kills all processes in the namespaces hydragraph0 and hydragraph1, and removes the
namespaces.
EOF
}

rate="" per_node=2 config=examples/demo.yaml
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --rate) rate="${2:?--rate needs a number of Mbit/s}"; shift 2 ;;
        --per-node) per_node="${2:?--per-node needs a number of ranks}"; shift 2 ;;
        --config) config="${2:?--config needs a file}"; shift 2 ;;
        --) shift; break ;;
        *) echo "two_nodes.sh: unknown option $1 (--help)" >&2; exit 2 ;;
    esac
done
if [ $# -eq 0 ]; then
    set -- --overwrite --set output=runs/two_nodes --set steps=20
fi

cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" > /dev/null || python=python3
for tool in ip unshare ${rate:+tc}; do
    command -v "$tool" > /dev/null || { echo "two_nodes.sh: needs $tool" >&2; exit 2; }
done
if [ "$(id -u)" -ne 0 ]; then
    echo "two_nodes.sh: network namespaces need root: sudo $0 $*" >&2
    exit 2
fi
if ip netns list | grep -qE '^hydragraph[01]\b'; then
    echo "two_nodes.sh: still running, or killed; if killed, run: ip netns del hydragraph0; ip netns del hydragraph1" >&2
    exit 2
fi

clean_up() {
    trap - EXIT INT TERM
    for node in 0 1; do
        # Kill all processes first: a suspended rank would keep the namespace and its memory.
        ip netns pids "hydragraph$node" 2> /dev/null | xargs --no-run-if-empty kill -KILL 2> /dev/null || true
        ip netns del "hydragraph$node" 2> /dev/null || true
    done
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for node in 0 1; do
    ip netns add "hydragraph$node"
done
ip link add link0 netns hydragraph0 type veth peer name link1 netns hydragraph1
for node in 0 1; do
    ip -n "hydragraph$node" address add "10.78.0.$((node + 1))/24" dev "link$node"
    ip -n "hydragraph$node" link set lo up
    ip -n "hydragraph$node" link set "link$node" up
    if [ -n "$rate" ]; then
        tc -n "hydragraph$node" qdisc add dev "link$node" root tbf rate "${rate}mbit" burst 256kb latency 100ms
    fi
done

pids=()
for node in 0 1; do
    # Each simulated machine has its own host name, because ranks with one host name count as one machine. On two real
    # machines, run `export GLOO_SOCKET_IFNAME=...` and `torchrun ...` (docs/several_machines.md).
    GLOO_SOCKET_IFNAME="link$node" OMP_NUM_THREADS=1 ip netns exec "hydragraph$node" \
        unshare --uts --pid --fork --mount-proc --kill-child sh -c 'hostname "$1"; shift; "$@"; exit $?' sh "node$node" \
        "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node "$per_node" --node-rank "$node" \
        --master-addr 10.78.0.1 --master-port 29500 -m hydragraph.cli train "$config" "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
