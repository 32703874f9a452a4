"""`hydragraph chaos`: inject faults into a run, and compare its losses with an undisturbed run's."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from hydragraph.commands.options import ConfigOptions, option, verb


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(ConfigOptions):
    kills: int | None = option("Number of ranks to kill; default: 10, or 0 with --kinds.", min=0)
    slow: int = option("Number of ranks to slow down for a second.", default=0, min=0)
    joins: int = option("Number of ranks that are asked to leave and then replaced.", default=0, min=0)
    kinds: str | None = option("Additional kinds of faults, such as two,again,rejoin; `?` describes all kinds.")
    each: int = option("Number of faults of each kind in --kinds.", default=3, min=1)
    seed: int = option("Random seed for the times and ranks of the faults.", default=0)
    keep: Path | None = option("Folder in which to keep the output of all runs.")


@verb
def chaos_command(options: ChaosOptions) -> None:
    """Train once while faults kill, slow down and replace ranks, and once undisturbed; compare the loss curves.

    --kinds adds other faults, from losing several ranks during a recovery to the preemption of a simulated machine;
    `--kinds ?` describes them.

    With `deterministic: true`, both runs' losses must be bitwise equal. Otherwise, a third run on one rank measures the
    effect of rounding.
    """
    from hydragraph.train.chaos import disturbed_run

    config = options.load()
    named = disturbed_run.read_kinds(options.kinds or "", config)
    kills = 10 if options.kills is None and not named else options.kills or 0
    counts = Counter({"kill": kills, "slow": options.slow, "join": options.joins})
    counts.update(dict.fromkeys(named, options.each))
    if config.ranks < 2:
        raise ValueError(f"'ranks' is {config.ranks}, but chaos kills ranks and needs at least 2: set a larger number")
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="hydragraph-chaos-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        strikes = disturbed_run.draw(counts, options.seed)
        peaceful, stormy = disturbed_run.prepared(config, folder, len(strikes), counts["preempt"])
        single = disturbed_run.alone(peaceful, folder)
        with console.status("training with faults") as status:

            def stepped(step: int, struck: int) -> None:
                status.update(f"training with faults: step {step}, {struck} of {len(strikes)} injected")

            machines = disturbed_run.MACHINES if counts["preempt"] else 1
            disturbed = disturbed_run.run(stormy, strikes, stepped, machines=machines)
        # Undisturbed runs stop after the same step.
        last = max((m.step for m in disturbed.metrics), default=1)
        with console.status("training without faults"):
            undisturbed = disturbed_run.run(peaceful, until=last).until(last)
        if undisturbed.code:
            raise ValueError(f"the run fails even without injected faults: {undisturbed.ending}")
        control = None
        if not config.deterministic:
            with console.status("training without faults on one rank, to measure the effect of rounding"):
                control = disturbed_run.run(single, until=last).until(last)
            if control.code:
                raise ValueError(f"the run fails on one rank: {control.ending}")
    table = Table(title=f"{len(disturbed.struck)} of {len(strikes)} faults, seed {options.seed}", show_header=False)
    for name, value in disturbed_run.rows(disturbed, undisturbed):
        table.add_row(name, value)
    if control is not None:
        table.add_row("largest relative difference due to rounding alone", f"{control.difference(undisturbed):.1e}")
    Console(width=120).print(table)
    wrong = []
    if len(disturbed.struck) < len(strikes):
        wrong.append(f"only {len(disturbed.struck)} of {len(strikes)} faults hit a rank before the run ended")
    if disturbed.code:
        wrong.append(f"the run failed: {disturbed.ending}")
    departed = disturbed_run.departure(disturbed, undisturbed, control)
    if departed is not None:
        rounding = "" if control is None else " by more than rounding"
        wrong.append(f"from step {departed} on, the disturbed run's losses differ{rounding} or are missing")
    if disturbed.left:
        wrong.append(f"processes {list(disturbed.left)} are still running after the run ended")
    wrong += disturbed.problems
    for problem in wrong:
        console.print(f"chaos failed: {problem}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(bool(wrong))
