"""Four ranks on one device, one of them killed: python benchmarks/one_gpu.py [--device cuda] [--ranks 4] [--json FILE]

NCCL refuses several ranks on one GPU, so they speak over gloo, through page-locked host memory: what is proven is that
survivors keep their processes, their contexts on the GPU and their state there, that a new process joins, and that the
losses stay those of the undisturbed run. On a CPU (`--device cpu`) the same is run without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

from benchmarks.elastic import config_in
from hydragraph.train.chaos import disturbed_run

STEPS = 40
AFTER = 12  # kill a rank after this step
AGREE = 1e-3  # of a loss; other groupings of sums, in so few steps


def main() -> None:
    """Train undisturbed and with a rank killed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write the same as data")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        config = config_in(
            Path(temporary),
            ranks=chosen.ranks,
            strategies=[f"{chosen.ranks // 2}*<tp1,pp2>"],
            device=chosen.device,
            backend="eager",
            steps=STEPS,
            elastic={"copies": 2},
        )
        peaceful, stormy = disturbed_run.prepared(config, Path(temporary), 0)
        strikes = [disturbed_run.InjectedFault("kill", AFTER, 0.5, 0.05)]
        disturbed = disturbed_run.run(replace(stormy, steps=STEPS), strikes, until=STEPS)
        undisturbed = disturbed_run.run(replace(peaceful, steps=STEPS))
    table = Table(title=f"{chosen.ranks} ranks on one {chosen.device}, one killed")
    for column in ("what", "measured"):
        table.add_column(column)
    told = dict(disturbed_run.rows(disturbed, undisturbed))
    for name, value in told.items():
        table.add_row(name, value)
    Console(width=120).print(table)
    joined = any(event.event == "join" for event in disturbed.events)
    wrong = []
    for name, run in (("disturbed", disturbed), ("undisturbed", undisturbed)):
        if run.code:
            wrong.append(f"the {name} run failed: {run.ending}")
    if not disturbed.struck or not any(event.event == "fault" for event in disturbed.events):
        wrong.append("no rank was killed")
    if not disturbed.difference(undisturbed) < AGREE:
        wrong.append(f"losses differ by {disturbed.difference(undisturbed):.1e}")
    if disturbed.left:
        wrong.append(f"processes {disturbed.left} were left behind")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"told": told, "joined": joined, "wrong": wrong}))
    for each in wrong:
        print(f"not as promised: {each}", file=sys.stderr)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
