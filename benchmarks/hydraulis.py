"""Speedup from planning every iteration, simulated with published constants of Llamas on A800 devices.

    python -m benchmarks.hydraulis                          # the paper's grid and sweeps, and its case study
    python -m benchmarks.hydraulis --cells 4 --iterations 5 # a slice of its grid
    python -m benchmarks.hydraulis --only sweeps            # grid, sweeps or case
    python -m benchmarks.hydraulis --only rollouts          # answers of reinforcement learning, by assumed lengths
    python -m benchmarks.hydraulis --grid wide              # another grid, and hydraulis.png
    python -m benchmarks.hydraulis --data DIR               # where the constants and length distributions are

These files define the ratios, and say which numbers are measured, published or assumed:

- benchmarks/published/paper_grid.py: the columns, and the paper's own cells (36: three models on two numbers of devices
  each, three settings of context and tokens, two distributions of lengths);
- benchmarks/published/rivals.py: how Megatron-LM, DeepSpeed and HotSPa are emulated;
- benchmarks/published/llamas.py: constants, and what they leave out;
- benchmarks/published/wide_grid.py: the other grid.

Nothing here is measured: everything is simulated from constants that others measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.published import paper_grid, wide_grid
from benchmarks.published.llamas import MODELS, read_profiles
from benchmarks.published.workload import rollouts

Cell = TypeVar("Cell", paper_grid.Cell, wide_grid.Cell)
WIDTH = 200
ITERATIONS = {"paper": 20, "wide": 100}
CASE_ITERATIONS = 100  # as in the paper


def every(
    cells: Sequence[Cell], task: Callable[..., Any], arguments: Callable[[Cell], tuple[Any, ...]], processes: int
) -> list[Any]:
    """Run a task for each cell, in processes, with a progress bar; return the results in order."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    found: dict[Any, Any] = {}
    context = multiprocessing.get_context("spawn")
    with bar, ProcessPoolExecutor(processes, mp_context=context) as pool:
        shown = bar.add_task("cells", total=len(cells))
        jobs = {pool.submit(task, cell, *arguments(cell)): cell for cell in cells}
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            bar.update(shown, advance=1)
            bar.console.print(f"done: {jobs[job].title}", highlight=False)
    return [found[cell] for cell in cells]


def paper(chosen: argparse.Namespace, profiles: dict[str, Any], quantiles: dict[str, Any], console: Console) -> None:
    """Print the paper's grid, sweeps and case study."""

    def arguments(cell: paper_grid.Cell) -> tuple[Any, ...]:
        return profiles[cell.model], quantiles[cell.data], iterations

    iterations = chosen.iterations or ITERATIONS["paper"]
    cells = [cell for cell in paper_grid.CELLS if cell.model in chosen.models]
    if chosen.only in (None, "grid"):
        results = every(thinned(cells, chosen.cells), paper_grid.measured, arguments, chosen.processes)
        console.print(paper_grid.table(results))
        for line in paper_grid.summary(results):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    if chosen.only in (None, "sweeps") and chosen.cells is None:
        for name, swept in paper_grid.SWEEPS.items():
            found = every(swept, paper_grid.measured, arguments, chosen.processes)
            console.print(paper_grid.sweep_table(f"section 8.3, {name}", found))
    if chosen.only == "rollouts":
        found = every(thinned(paper_grid.ROLLOUTS, chosen.cells), paper_grid.measured, arguments, chosen.processes)
        console.print(paper_grid.sweep_table("drawn lengths of answers", found))
    if chosen.only in (None, "case") and chosen.cells is None:
        case = paper_grid.CASE
        count = chosen.iterations or CASE_ITERATIONS
        console.print(paper_grid.case_table(paper_grid.case_study(profiles[case.model], quantiles[case.data], count)))


def thinned(cells: Sequence[Cell], count: int | None) -> Sequence[Cell]:
    """Return so many cells, spread over all of them."""
    return cells if count is None else [cells[i * len(cells) // count] for i in range(min(count, len(cells)))]


def wide(chosen: argparse.Namespace, profiles: dict[str, Any], quantiles: dict[str, Any], console: Console) -> None:
    """Print the wider grid."""
    charged = {
        m: p if chosen.sync_ms is None else replace(p, hetero_sync_s=chosen.sync_ms / 1e3) for m, p in profiles.items()
    }
    iterations = chosen.iterations or ITERATIONS["wide"]

    def arguments(cell: wide_grid.Cell) -> tuple[Any, ...]:
        return charged[cell.model], quantiles[cell.data], iterations

    cells = thinned(wide_grid.cells_of(chosen.models), chosen.cells)
    wide_grid.report(every(cells, wide_grid.simulate, arguments, chosen.processes), console, chosen.picture)


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the constants and lengths are")
    parser.add_argument("--grid", choices=("paper", "wide"), default="paper")
    parser.add_argument(
        "--only", choices=("grid", "sweeps", "case", "rollouts"), help="a part of what belongs to the paper's grid"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--cells", type=int, help="so many cells of the grid, and nothing else")
    parser.add_argument("--iterations", type=int, help=f"of each cell; default: {ITERATIONS}")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sync-ms", type=float, help="of the wider grid's unequal pipelines; default: as published")
    parser.add_argument("--picture", type=Path, default=Path("hydraulis.png"), help="of the wider grid")
    chosen = parser.parse_args()
    constants, lengths = chosen.data / "hydraulis_profiles.json", chosen.data / "length_distributions.json"
    if not (constants.is_file() and lengths.is_file()):
        print(f"skipped: {constants} or {lengths} is not there; give their folder with --data")
        return
    profiles = read_profiles(constants)
    quantiles = {**json.loads(lengths.read_text(encoding="utf-8")), "rollouts": rollouts()}
    {"paper": paper, "wide": wide}[chosen.grid](chosen, profiles, quantiles, Console(width=WIDTH))


if __name__ == "__main__":
    main()
