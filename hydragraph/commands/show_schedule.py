"""`hydragraph show DIR --schedule`: draw stages' forwards and backwards over time, as text or a picture.

The time unit is one block's forward; a backward takes two units, or three with recomputation, and messages none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydragraph.commands.options import check_written
from hydragraph.commands.show_folder import WIDTH, ShownStrategy, shortened
from hydragraph.data.atomic_write import save_figure
from hydragraph.ir.instruction import Instruction, Op
from hydragraph.ir.program_outline import Outline
from hydragraph.ir.schedules.schedule import RETURNING, Action, Place, Schedule, Work
from hydragraph.ir.shared_programs_text import runs_text
from hydragraph.passes.place import PlacedStage, place

_COLOURS = {
    Work.FORWARD: "#4c8bd0",
    Work.BACKWARD: "#74b06f",
    Work.INPUT_GRADIENT: "#74b06f",
    Work.WEIGHT_GRADIENT: "#b5d99c",
}
# Maximum rows with full height and numbers
_TALLEST = 40


@dataclass(frozen=True)
class Task:
    """A micro-batch's work on a stage.

    Attributes:
        visit: the stage's index among the rank's stages.
    """

    work: Work
    micro_batch: int
    begin: int
    end: int
    visit: int = 0

    @property
    def text(self) -> str:
        """Label such as F0 (forward of micro-batch 0), or F0:1 on a rank's second interleaved stage."""
        return f"{self.work.value}{self.number}"

    @property
    def number(self) -> str:
        return f"{self.micro_batch}:{self.visit}" if self.visit else str(self.micro_batch)


@dataclass(frozen=True)
class StageRow:
    pipelines: tuple[int, ...]
    stage: int
    ranks: tuple[int, ...]
    tasks: tuple[Task, ...]


def schedule(each: ShownStrategy) -> list[StageRow]:
    """Return a row of tasks per stage; equal rows of pipelines are merged."""
    outline = each.whole.program.outline
    stages = place(outline, each.strategy, each.record.micro_batches).stages
    timed = _timed(stages, [_counted(each.programs[stage.ranks[0]].instructions, stage, outline) for stage in stages])
    # rows: (depth, number, ranks, layers, tasks) -> the stages in this row.
    rows: dict[object, list[PlacedStage]] = {}
    for stage, tasks in zip(stages, timed, strict=True):
        role = stage.roles[0]
        rows.setdefault((role.depth, role.stage, len(stage.ranks), stage.layers, tasks), []).append(stage)
    merged = []
    for members in rows.values():
        pipelines = tuple(sorted({role.pipeline for stage in members for role in stage.roles}))
        ranks = tuple(rank for stage in members for rank in stage.ranks)
        merged.append(StageRow(pipelines, members[0].roles[0].stage, ranks, timed[stages.index(members[0])]))
    return sorted(merged, key=lambda row: (row.pipelines[0], row.stage))


def _counted(instructions: Sequence[Instruction], stage: PlacedStage, outline: Outline) -> Counter[Action]:
    actions: Counter[Action] = Counter()
    for instruction in instructions:
        if instruction.op in (Op.FORWARD, Op.BACKWARD) and instruction.target != "aux":
            m = instruction.batch
            visit = stage.visit_of(outline.index[instruction.target])
            actions[Action(instruction.work, stage.role_of(m, visit).pipeline, m, visit)] += 1
    return actions


def _timed(stages: Sequence[PlacedStage], counted: Sequence[Counter[Action]]) -> list[tuple[Task, ...]]:
    # places[pipeline][stage]: (row, visit), where `visit` counts a rank's stages.
    # chains[pipeline]: its places, in the order that micro-batches take.
    places: dict[int, dict[int, Place]] = defaultdict(dict)
    for row, stage in enumerate(stages):
        for role in stage.roles:
            places[role.pipeline][role.stage] = (row, role.visit)
    chains = [[places[pipeline][number] for number in sorted(places[pipeline])] for pipeline in sorted(places)]
    lengths = [
        [_length(action.work, stage) * blocks for action, blocks in actions.items()]
        for stage, actions in zip(stages, counted, strict=True)
    ]
    begins = Schedule("", tuple(map(tuple, counted))).begins(chains, lengths)
    return [
        tuple(
            Task(action.work, action.micro_batch, begin, begin + length, action.visit)
            for action, begin, length in zip(*row, strict=True)
        )
        for row in zip(counted, begins, lengths, strict=True)
    ]


def _length(work: Work, stage: PlacedStage) -> int:
    # Recomputation repeats the forward: one more unit.
    again = work in RETURNING and bool(stage.kind.recompute)
    return (2 if work is Work.BACKWARD else 1) + again


def schedule_lines(strategies: Sequence[ShownStrategy], rank: int | None) -> Iterator[str]:
    yield "F0 is the forward of micro-batch 0, B0 its backward, . is idle; the unit is one block's forward"
    for strategy in strategies:
        every = schedule(strategy)
        end = max((row.tasks[-1].end for row in every if row.tasks), default=0)
        rows = _of_rank(every, rank)
        yield f"under {strategy.name}"
        if not rows:
            yield f"  rank {rank} belongs to no stage: it only stores its share of the weights"
            continue
        names = [_name(row) for row in rows]
        margin = 2 + max(map(len, names), default=0) + 1
        # Round up to fit: 250 units in 80 columns are 4 per column.
        unit = max(1, -(-end // max(1, WIDTH - margin)))  # forwards per column
        busy = sum((t.end - t.begin) * len(row.ranks) for row in rows for t in row.tasks)
        ranks = sum(len(row.ranks) for row in rows)
        idle = 1 - busy / (end * ranks) if end else 0.0
        who = "the ranks that work are" if rank is None else f"rank {rank} is"
        yield f"  {end} units in all, {unit} per column; {who} idle {idle:.0%} of the time"
        lines = [
            f"  {name:<{margin - 3}} {_cells(row.tasks, end, unit)}" for name, row in zip(names, rows, strict=True)
        ]
        yield from shortened(lines, rows=64, more=" stages")


def _of_rank(rows: Sequence[StageRow], rank: int | None) -> list[StageRow]:
    return [row for row in rows if rank is None or rank in row.ranks]


def _name(row: StageRow) -> str:
    return f"pipeline {_few(row.pipelines)} stage {row.stage} ranks {_few(row.ranks)}"


def _few(numbers: Sequence[int]) -> str:
    text = runs_text(numbers)
    return text if len(text) <= 12 else f"{numbers[0]}..{numbers[-1]}"


def _cells(tasks: Sequence[Task], end: int, unit: int) -> str:
    cells = ["."] * -(-end // unit)
    for task in tasks:
        first = task.begin // unit
        last = max(first + 1, task.end // unit)
        width = last - first
        text = task.text if len(task.text) <= width else task.text[0]
        cells[first:last] = f"{text:-<{width}}"
    return "".join(cells)


def check_drawn(path: Path) -> None:
    from hydragraph.train.loss_picture import matplotlib_installed

    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"--output {path}: name a file that ends in .png or .svg")
    check_written("--output", path)
    if not matplotlib_installed():
        raise ValueError("--output needs matplotlib: pip install matplotlib, or omit --output and read the text")


def write_schedule(strategies: Sequence[ShownStrategy], path: Path, rank: int | None) -> None:
    from matplotlib.figure import Figure

    grids = {strategy.name: schedule(strategy) for strategy in strategies}
    heights = [0.7 + 0.28 * min(len(_of_rank(rows, rank)), _TALLEST) for rows in grids.values()]  # inches
    figure = Figure(figsize=(12, 0.6 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(grids), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (name, rows) in zip(panels[:, 0], grids.items(), strict=True):
        _draw(axes, name, _of_rank(rows, rank), max((row.tasks[-1].end for row in rows if row.tasks), default=1))
    panels[-1, 0].set_xlabel("time, in forwards of one block; numbers are micro-batches")
    save_figure(figure, path, path.suffix[1:])


def _draw(axes: Any, name: str, rows: Sequence[StageRow], end: int) -> None:
    for i, row in enumerate(rows):
        for task in row.tasks:
            width = task.end - task.begin
            axes.barh(i, width, 0.8, task.begin, color=_COLOURS[task.work], edgecolor="white", linewidth=0.6)
            if width > 0.012 * end and len(rows) <= _TALLEST:
                middle = task.begin + width / 2
                axes.text(middle, i, task.number, ha="center", va="center", color="white", fontsize=7)
    labels: Mapping[int, str] = dict(enumerate(map(_name, rows)))
    axes.set_yticks(list(labels), list(labels.values()), fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_title(name, fontsize="small")
