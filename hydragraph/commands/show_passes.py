"""`hydragraph show --passes`: print passes, and graphs after each pass."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from torch import fx

from hydragraph.ir.program import Block, Program
from hydragraph.passes.graph_passes import GRAPH_PASSES, modules_of, run_passes
from hydragraph.passes.graph_text import changes, graph_text
from hydragraph.passes.pipeline import PASSES, after_each_pass
from hydragraph.passes.place import place
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from hydragraph.spec.strategy import Strategy


def list_passes() -> Iterator[str]:
    yield "graph passes: from a block's template to the graphs that one rank of a stage runs"
    for number, graph_pass in enumerate(GRAPH_PASSES, start=1):
        yield f"{number}. {graph_pass.name:<20}{graph_pass.meaning} ({graph_pass.when})"
    yield "program passes: from a placed strategy to the instructions of each rank"
    for number, (name, function) in enumerate(PASSES, start=1):
        meaning = (function.__doc__ or "").strip().split("\n")[0]
        yield f"{number}. {name:<20}{meaning}"


def dump_passes(program: Program, variants: Variants, strategy: Strategy, rank: int | None) -> Iterator[str]:
    """Yield templates and graphs after each pass, by default for the first rank of each kind of stage."""
    shown = set()
    for block, part in _places(program, strategy, rank):
        key = (block.template, part)
        if key not in shown:
            shown.add(key)
            yield from _dump(variants.spec(block, part))


def dump_program_passes(program: Program, strategy: Strategy, ranks: int, rank: int | None) -> Iterator[str]:
    """Yield a rank's program after each pass, by default for a rank of the first pipeline's last stage."""
    counts = [2] * len(strategy.pipelines)
    shown = strategy.pipelines[0].stages[-1].devices[0] if rank is None else rank
    yield f"# rank {shown} of {ranks} under {strategy}, {counts[0]} micro-batches per pipeline"
    before: list[str] = []
    began = time.perf_counter()
    for name, after in after_each_pass(program.outline, strategy, counts, shown, ranks=ranks):
        seconds = time.perf_counter() - began
        lines = str(after).splitlines()
        kept = sum(block.size for block in SequenceMatcher(None, before, lines, autojunk=False).get_matching_blocks())
        change = f"{len(lines) - kept} lines added, {len(before) - kept} removed"
        yield f"## after {name} ({1e3 * seconds:.1f} ms): {change}"
        yield str(after)
        before = lines
        began = time.perf_counter()


def _places(program: Program, strategy: Strategy, rank: int | None) -> Iterator[tuple[Block, StagePart]]:
    placement = place(program.outline, strategy, [1] * len(strategy.pipelines))
    ranks: Sequence[int] = [stage.ranks[0] for stage in placement.stages] if rank is None else [rank]
    for owner in ranks:
        stage = placement.stage_of.get(owner)
        for position in stage.positions if stage is not None else ():
            assert stage is not None
            yield program.blocks[position], stage.part_of(owner)


def _dump(spec: VariantSpec) -> Iterator[str]:
    kind = ", ".join([f"place {spec.part.index} of tp {spec.part.tp}", *spec.part.kind.marks])
    before: dict[str, fx.GraphModule] = modules_of(spec.template)
    yield f"# {spec.where}, {kind}"
    yield f"## its template\n{graph_text(before['forward'])}"
    for result in run_passes(spec):
        after = modules_of(result.graphs)
        for name, module in after.items():
            change = changes(before.get(name), module)
            yield f"## after {result.name} ({1e3 * result.seconds:.1f} ms): {name}, {change}"
            if not change.endswith("unchanged"):
                yield graph_text(module)
        before = after
