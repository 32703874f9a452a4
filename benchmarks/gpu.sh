#!/usr/bin/env bash
# All benchmarks on one GPU, within 9 minutes: first a bf16 step of a small model against the CPU, then how fast steps
# are, whether kernels are right, how fast these are, what was predicted, and four ranks of which one is killed.
#
#   bash benchmarks/gpu.sh          # writes benchmarks/results/<gpu>_<date>.md
#   bash benchmarks/gpu.sh --rehearse  # its first four parts at the smallest sizes on the CPU, in minutes
#   bash benchmarks/gpu.sh --cpu    # the same at small sizes on the CPU, which proves the script, not the targets
#
# PYTHON (default: python) is the interpreter, OUT (default: benchmarks/results) the folder of the page.
# The exit code is 1 where a test or a benchmark failed; a missed target is no failure, the page says it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python}
out=${OUT:-benchmarks/results}
device=cuda
rehearse=no
total=530  # seconds on a GPU
case "${1:-}" in
  "") ;;
  --cpu) device=cpu total=3000 ;;
  --rehearse) device=cpu rehearse=yes total=330 ;;
  *) echo "gpu.sh: unknown option '$1': use --cpu, --rehearse, or none" >&2; exit 2 ;;
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
  local part=$1 limit began=$SECONDS
  limit=$(left "$2")
  shift 2
  if [ "$limit" -eq 0 ]; then
    echo "== $part: left out, less than 30 s are left" >&2
    facts+=(--fact "$part: left out, less than 30 s were left")
    return
  fi
  echo "== $part (at most $limit s)" >&2
  if timeout "$limit" "$@" >&2; then
    facts+=(--fact "$part: passed, $((SECONDS - began)) s")
  else
    failed+=("$part")
    facts+=(--fact "$part: FAILED, or took more than $limit s (see above)")
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

# left SECONDS: what a part may take: what it asks for, or what is left of the whole; less than 30 s leave it out (0).
left() {
  local rest=$((total - SECONDS))
  if [ "$rest" -lt 30 ]; then echo 0; elif [ "$rest" -lt "$1" ]; then echo "$rest"; else echo "$1"; fi
}

# A function, so that bash has read all of it before it runs any.
main() {
  local smoke="benchmarks/smoke.py --json $parts/smoke.json"
  if [ "$device" = cuda ]; then
    # The most important answers first: a step that is right, and how fast it is.
    run smoke 90 "$python" $smoke --device cuda
    bench step 150 step --device cuda
    run correctness 150 "$python" -m pytest -q -m "" tests/commands/bench/test_on_device.py
    bench kernels 90 kernels --device cuda
    predicted 60 --device cuda --rounds 3
    run one-killed 75 "$python" benchmarks/one_gpu.py --device cuda
    bench link-7b 30 link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b
    bench link-measured 30 link --from '<tp2,pp1>' --to '<tp1,pp2>' --model tiny
  elif [ "$rehearse" = yes ]; then
    run smoke 90 "$python" $smoke --device cpu --backends eager
    bench step 90 step --device cpu --model tiny --tokens 64 --rounds 1
    run correctness 90 "$python" -m pytest -q -m "" tests/commands/bench/test_on_device.py
    bench kernels 60 kernels adamw --device cpu
  else
    run smoke 120 "$python" $smoke --device cpu
    bench step 480 step --device cpu --model tiny --tokens 512 --rounds 3 --compiled
    run correctness 150 "$python" -m pytest -q -m "" tests/commands/bench/test_on_device.py
    bench kernels 240 kernels --device cpu --compiled
    predicted 600 --rounds 2
    run one-killed 300 "$python" benchmarks/one_gpu.py --device cpu
    bench link-7b 120 link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b
    bench link-measured 240 link --from '<tp2,pp1>' --to '<tp1,pp2>' --model tiny
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
