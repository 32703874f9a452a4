#!/usr/bin/env bash
# All benchmarks on one GPU, in less than 8 minutes: first whether kernels are right there, then how fast they are; and
# four ranks on it, one of which is killed.
#
#   bash benchmarks/gpu.sh          # writes benchmarks/results/<gpu>_<date>.md
#   bash benchmarks/gpu.sh --cpu    # the same at small sizes on the CPU, which proves the script, not the targets
#
# PYTHON (default: python) is the interpreter, OUT (default: benchmarks/results) the folder of the page.
# The exit code is 1 where a test or a benchmark failed; a missed target is no failure, the page says it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python}
out=${OUT:-benchmarks/results}
device=cuda
case "${1:-}" in
  "") ;;
  --cpu) device=cpu ;;
  *) echo "gpu.sh: unknown option '$1': use --cpu, or none" >&2; exit 2 ;;
esac

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ "$device" = cuda ]; then
  if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: PyTorch finds no GPU here; --cpu runs everything at small sizes on the CPU" >&2
    exit 2
  fi
  name=$("$python" -c 'import re, torch; print(re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))')
else
  name=cpu
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi

parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
failed=()
written=()
facts=()

# run NAME SECONDS COMMAND...: run one part, and go on to the next also where it fails.
run() {
  local part=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $part" >&2
  if timeout "$limit" "$@" >&2; then
    facts+=(--fact "$part: passed, $((SECONDS - began)) s")
  else
    failed+=("$part")
    facts+=(--fact "$part: FAILED or took more than $limit s")
  fi
  if [ -f "$parts/$part.json" ]; then written+=("$parts/$part.json"); fi
}

bench() {
  local part=$1 limit=$2
  shift 2
  run "$part" "$limit" "$python" -m hydragraph.cli bench "$@" --json "$parts/$part.json"
}

# Costs calibrated here, and what they predict beside what steps take.
predicted() {
  local limit=$1
  shift
  run predicted "$limit" "$python" benchmarks/costs.py --only predicted "$@" --json "$parts/predicted.json"
}

# A function, so that bash has read all of it before it runs any.
main() {
  export HYDRAGRAPH_ON_DEVICE=1  # which a CPU otherwise leaves to other tests
  run correctness 150 "$python" -m pytest -q tests/bench/test_on_device.py
  if [ "$device" = cuda ]; then
    bench kernels 120 kernels --device cuda
    bench link-7b 30 link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b
    bench link-measured 30 link --from '<tp2,pp1>' --to '<tp1,pp2>' --model tiny
    run one-killed 75 "$python" benchmarks/one_gpu.py --device cuda
    bench step $((415 - SECONDS)) step --device cuda
    predicted $((475 - SECONDS)) --device cuda --rounds 3
  else
    bench kernels 240 kernels --device cpu --compiled
    bench link-7b 120 link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b
    bench link-measured 240 link --from '<tp2,pp1>' --to '<tp1,pp2>' --model tiny
    run one-killed 300 "$python" benchmarks/one_gpu.py --device cpu
    bench step 480 step --device cpu --model tiny --tokens 512 --rounds 3 --compiled
    predicted 600 --rounds 2
  fi

  mkdir -p "$out"
  page="$out/${name}_$(date +%F).md"
  if [ "${#written[@]}" -gt 0 ]; then
    "$python" -m hydragraph.cli bench report "${written[@]}" --markdown "$page" "${facts[@]}" --fact "all in $SECONDS s"
  fi
  if [ "${#failed[@]}" -gt 0 ]; then
    echo "gpu.sh: failed: ${failed[*]}" >&2
    exit 1
  fi
}

main
