"""What it costs to lose ranks: python benchmarks/elastic.py [pause] [kills] [monitor]

pause     8 local ranks, one of them killed: the time between two steps, and how long ranks took to meet and to move
          state, with two copies and from disk
kills     `hydragraph chaos` with 100 kills in one run of `deterministic: true`: survived, with the same curve bit for
          bit, and no process left behind
monitor   CPU seconds of a step with `elastic.monitor` and without, alternately
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from hydragraph.elastic.events import read_events
from hydragraph.spec.record import from_record
from hydragraph.train import chaos
from hydragraph.train.config import TrainConfig
from hydragraph.train.metrics import read_metrics

RANKS = 8
SPARES = 2  # of the run that is killed again and again
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "many", "lazy", "uneven", "devices", "that", "train")


def config_in(folder: Path, **changed: Any) -> TrainConfig:
    """Return the config of a small Llama on texts that are written into the folder."""
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        words = [WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(60 + 11 * number)]
        (texts / f"{number:02}.txt").write_text(" ".join(words))
    return from_record(
        TrainConfig,
        {
            "model": {
                "architecture": "LlamaForCausalLM",
                "config": {
                    "hidden_size": 128,
                    "intermediate_size": 256,
                    "num_hidden_layers": 8,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 4,
                    "max_position_embeddings": 128,
                },
            },
            "data": {"paths": [str(texts)], "vocab_size": 400, "max_length": 64, "tokens_per_step": 512},
            "strategies": ["4*<tp1,pp2>"],
            "steps": 40,
            "ranks": RANKS,
            "device": "cpu",
            "check": "off",
            "output": str(folder / "run"),
            **changed,
        },
    )


def pause(table: Table) -> None:
    """Kill one of 8 ranks."""
    for name, elastic, every in (("copies 2", {"copies": 2}, 0), ("from disk", {"min_ranks": 1}, 5)):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            settings = {**elastic, "rejoin": False}
            config = config_in(folder, elastic=settings, checkpoint_every=every)
            seen: dict[int, float] = {}

            def stepped(step: int, struck: int, seen: dict[int, float] = seen) -> None:
                seen.setdefault(step, time.monotonic())

            strikes = [chaos.Strike("kill", 17, 0.7, 0.0)]
            done = chaos.run(config, strikes, stepped, until=config.steps)
            took = [event.seconds for event in done.events if event.event == "resumed"]
            times = sorted(seen.values())
            gaps = [after - before for before, after in pairwise(times)]
            usual, longest = median(gaps), max(gaps)
            whole = "yes" if done.code == 0 and len(done.metrics) == config.steps else f"no: {done.said}"
            table.add_row(
                f"pause, {name}",
                f"{longest:.2f} s between two steps (usually {usual:.2f}), {took[0] if took else float('nan'):.2f} s of"
                f" it to meet and to move; finished: {whole}",
                "2 s" if every == 0 else "5 s",
            )


def kills(table: Table, count: int) -> None:
    """Kill ranks of one run again and again."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        elastic = {"copies": 2, "spares": SPARES}
        config = config_in(folder, ranks=4, strategies=["2*<tp1,pp2>"], elastic=elastic, checkpoint_every=20)
        config = replace(config, deterministic=True, backend="eager")
        peaceful, stormy = chaos.prepared(config, folder, count)

        def stepped(step: int, struck: int) -> None:
            if step % 20 == 0:
                print(f"step {step}: {struck} of {count} kills", file=sys.stderr)

        disturbed = chaos.run(stormy, chaos.draw(count, 0, 0, seed=7), stepped)
        last = max(m.step for m in disturbed.metrics)
        undisturbed = chaos.run(peaceful, until=last).until(last)
        departed = chaos.departure(disturbed, undisturbed, None)
        equal = "every bit of every loss" if departed is None else f"other losses from step {departed} on"
        table.add_row(f"{count} kills: equal to the undisturbed run", equal, "curve equal")
        for name, value in chaos.rows(disturbed, undisturbed):
            table.add_row(f"{count} kills: {name}", value, "")
        said = f": {disturbed.said}" if disturbed.code else ""
        table.add_row(f"{count} kills: exit code", f"{disturbed.code}{said}", "0")


def monitor(table: Table) -> None:
    """Compare runs with the monitor and without, one after another."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(6):
            on = bool(number % 2)
            config = config_in(Path(temporary), ranks=2, strategies=["<tp1,pp2>"], steps=60)
            config = replace(config, elastic=replace(config.elastic, monitor=on))
            file = Path(temporary) / "config.yaml"
            config.save(file)
            command = [sys.executable, "-m", "hydragraph", "train", str(file), "--overwrite"]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            steps = read_metrics(Path(config.output) / "metrics.jsonl")
            seconds[on].append(median(m.seconds for m in steps[10:]))
            read_events(Path(config.output) / "events.jsonl")
    without, beside = min(seconds[False]), min(seconds[True])
    table.add_row("monitor", f"{beside:.4f} s for {without:.4f} s a step: {beside / without - 1:+.1%}", "1 %")


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="pause, kills, monitor; default: all")
    parser.add_argument("--count", type=int, default=100, help="kills")
    chosen = parser.parse_args()
    parts = chosen.parts or ["pause", "kills", "monitor"]
    table = Table(title=f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for column in ("what", "measured", "target"):
        table.add_column(column)
    if "pause" in parts:
        pause(table)
    if "kills" in parts:
        kills(table, chosen.count)
    if "monitor" in parts:
        monitor(table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
