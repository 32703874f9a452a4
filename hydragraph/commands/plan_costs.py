"""Costs of `hydragraph plan --cluster`, and compilation of the graphs that determine memory.

With a second core, another process compiles about half of the graphs, then graphs with sums in pieces:

    python -m hydragraph.commands.plan_costs    reads pickled `PlanOptions` from stdin

The main process finds the other process's graphs in the user's cache.
"""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from hydragraph.cluster.module_process import start_module
from hydragraph.commands.plan_options import PlanOptions
from hydragraph.commands.progress import Say
from hydragraph.planner.uncollected import uncollected
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.compiled_blocks import VariantOf
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.spec.stage_kind import StageKind, StagePart
    from hydragraph.train.plan_input import CostFiles

Ready = Callable[[str, "StagePart"], bool]

# Time of a trace, relative to the time in which a kind's graphs are derived from the trace
TRACED = 4
POLL_S = 0.05


@contextmanager
def compiled_by_two(asked: PlanOptions) -> Iterator[Callable[[], bool]]:
    """Start the other process; yield a function that returns whether it runs."""
    if asked.model is None or (os.cpu_count() or 1) < 2:
        yield lambda: False
        return
    nowhere = subprocess.DEVNULL
    with start_module(__name__, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, bufsize=0) as helper:
        assert helper.stdin is not None
        # Without a helper, this process compiles all graphs
        with suppress(BrokenPipeError):
            helper.stdin.write(pickle.dumps(asked))
        try:
            yield lambda: helper.poll() is None
        finally:
            helper.kill()


@dataclass(frozen=True)
class PlanInputs:
    cluster: Cluster
    config: TrainConfig | None
    health: Health | None
    home: Home
    files: CostFiles

    @classmethod
    def read(cls, asked: PlanOptions) -> PlanInputs:
        """Read files except lengths and strategies, without importing PyTorch."""
        from hydragraph.train.plan_input import CostFiles, read_corrections

        assert asked.cluster is not None, "plan_command requires it"
        cluster = Cluster.load(asked.cluster)
        config = None if asked.model is None else TrainConfig.load(asked.model)
        rates = None if asked.health is None else Health.load(asked.health)
        last = len(cluster.devices) - 1
        for rank in rates or ():
            if rank > last:
                raise ValueError(f"{asked.health}: rank {rank} is not in {asked.cluster}, which has ranks 0 to {last}")
        if rates is not None and len(rates.lost) > last:
            raise ValueError(f"{asked.health}: all devices are lost: give at least one rank a finite rate")
        home = _home(config, asked.running is not None) if asked.home is None else Home.parse(asked.home)
        home.check(last + 1)
        measured = _merged(asked.profile, cluster) if asked.profile else None
        return cls(cluster, config, rates, home, CostFiles(measured, read_corrections(asked.corrections)))


def costs_of_plan(asked: PlanOptions, inputs: PlanInputs, say: Say) -> tuple[Costs, str, Ready]:
    """Return the costs, a description of their source, and a test for cached graphs."""
    from hydragraph.commands.captured_model import captured, costs_of_run
    from hydragraph.cost.compiled_blocks import CompiledBlocks
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.cost.published_errors import MEMORY

    cluster = inputs.cluster
    config = inputs.config
    measured = inputs.files.profile
    corrections = inputs.files.corrections
    if config is None:
        assert measured is not None, "PlanOptions.check requires a profile or a model"
        costs = Costs(measured, cluster, inputs.health, home=inputs.home, corrections=corrections)
        return costs, f"{costs.source_of()}; memory predicted from the profile", lambda *_: False
    say("capturing the model")
    _, program, variants = captured(config)
    if measured is None:
        # A tensor-parallel group never spans nodes. `datasheet` predicts every degree up to the
        # largest node.
        most = max(cluster.node(device.node).devices for device in cluster.devices)
        measured = datasheet(program, cluster, asked.efficiency, range(1, most + 1))
    elif len(measured.blocks) != len(program.blocks):
        raise ValueError(
            f"profile {measured.name} describes a model of {len(measured.blocks)} blocks, but --model has "
            f"{len(program.blocks)}: measure this model with hydragraph profile"
        )
    blocks = CompiledBlocks(program, _told(variants.get, say))
    costs = costs_of_run(config, measured, cluster, corrections, blocks=blocks)
    costs = costs.changed(health=inputs.health, home=inputs.home)
    named = {block.name: block for block in program.blocks}
    source = f"{costs.source_of()}; {MEMORY}"
    return costs, source, lambda block, part: variants.traced(named[block], part)


def compile_graphs(
    costs: Costs, seconds: float | None, ready: Ready = lambda *_: False, helped: Callable[[], bool] = lambda: False
) -> Costs:
    """Compile graphs until `seconds` have passed, and return the costs of the compiled or `ready` kinds of stages.

    Kinds with one device per stage are always compiled.

    Args:
        helped: whether the other process, which compiles its share of the kinds, still runs.
    """
    from hydragraph.spec.stage_kind import StagePart

    began = time.monotonic()
    until = math.inf if seconds is None else began + seconds
    late: set[StageKind] = set()

    def done(kind: StageKind) -> bool:
        return all(ready(block, StagePart(kind)) for block in _examples(costs))

    own, others = _halves(costs)
    for kind in own:
        # After the time limit, only kinds whose graphs the cache has are added; tp 1 always is.
        if kind.tp > 1 and time.monotonic() > until and not done(kind):
            late.add(kind)
        else:
            _compile(costs, kind)
    # The halves take about the same time. If the other process is much slower, also compile its half.
    patience = min(until, 2 * time.monotonic() - began)
    for kind in others:
        while helped() and time.monotonic() < patience and not done(kind):
            time.sleep(POLL_S)
        if kind.tp > 1 and time.monotonic() > until and not done(kind):
            late.add(kind)
        else:
            _compile(costs, kind)
    return costs.changed(profile=_without(costs.profile, late)) if late else costs


def compile_other_half(costs: Costs) -> None:
    """Compile the graphs that the main process does not compile, then graphs with sums in pieces."""
    own, others = _halves(costs)
    pieces = [
        kind._replace(sums_in_pieces=True) for kind in (*own, *others) if kind.tp > 1 and not kind.sequence_parallel
    ]
    for kind in [*others, *pieces]:
        _compile(costs, kind)


def _halves(costs: Costs) -> tuple[list[StageKind], list[StageKind]]:
    """Divide kinds of stages between two processes such that no trace is made twice."""
    rules = [parameter.rule for bucket in costs.buckets for parameter in bucket.parameters]

    def trace(kind: StageKind) -> tuple[int, bool]:
        # Several degrees share a trace, except those that leave one head to a rank (`passes.joint`).
        alone = kind.tp == 1 or any(rule is not None and rule.leaves_one_head(kind.tp) for rule in rules)
        return kind.tp if alone else 0, kind.sequence_parallel

    groups: dict[tuple[int, bool], list[StageKind]] = {}
    for kind in sorted(_kinds(costs), key=lambda kind: (trace(kind), kind)):
        groups.setdefault(trace(kind), []).append(kind)
    work = [TRACED + len(kinds) for kinds in groups.values()]
    first = max(1, sum(2 * total <= sum(work) for total in accumulate(work)))
    lists = list(groups.values())
    return list(chain(*lists[:first])), list(chain(*lists[first:]))


def _compile(costs: Costs, kind: StageKind) -> None:
    from hydragraph.spec.stage_kind import StagePart

    for block in _examples(costs):
        costs.blocks.adds(block, StagePart(kind))


def _examples(costs: Costs) -> Collection[str]:
    return dict(zip(costs.profile.blocks, costs.outline.blocks, strict=True)).values()


def _kinds(costs: Costs) -> list[StageKind]:
    working = [rank for rank in range(costs.ranks) if math.isfinite(costs.health.rate(rank))]
    ranks = Counter((costs.cluster.type_of(rank), costs.cluster.node_of(rank)) for rank in working)
    # ranks: (type, node) -> working devices. A stage's devices share both.
    kinds: set[StageKind] = set()
    for name in costs.cluster.types:
        most = max((count for (of, _), count in ranks.items() if of == name), default=0)
        kinds |= {kind for kind in costs.profile.of(name).pieces if kind.tp <= most and costs.sizes.allows(kind.tp)}
    return sorted(kinds)


def excluded_text(before: Costs, after: Costs) -> str:
    kept = {kind for profile in (after.profile, *after.profile.others) for kind in profile.pieces}
    every = {kind for profile in (before.profile, *before.profile.others) for kind in profile.pieces}
    count = len(every - kept)
    if not count:
        return ""
    return (
        f"; excluded {count} kind{'s' * (count > 1)} of stages that were not compiled in time: try again, because "
        "compiled graphs are cached"
    )


def _without(profile: Profile, kinds: Collection[StageKind]) -> Profile:
    pieces = {kind: piece for kind, piece in profile.pieces.items() if kind not in kinds}
    return replace(profile, pieces=pieces, others=tuple(_without(other, kinds) for other in profile.others))


def _home(config: TrainConfig | None, running: bool) -> Home:
    if config is None:
        return Home()
    return config.home if running else Home(copies=config.home.copies)


def _told(compiled: VariantOf, say: Say) -> VariantOf:
    known: set[object] = set()

    def get(block: Any, part: Any) -> Any:
        if (block.template, part) not in known:
            known.add((block.template, part))
            before = say(f"compiling graphs to find their memory: tensor-parallel degree {part.kind.tp}")
            compiled(block, part)
            say(before)
        return compiled(block, part)

    return get


def _merged(texts: Sequence[str], cluster: Cluster) -> Profile:
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.train.plan_input import read_profile

    names = ", ".join(cluster.types)
    several = len(cluster.types) > 1 or len(texts) > 1
    profiles = []
    for text in texts:
        profile = read_profile(text)
        if several and any(not part.type for part in (profile, *profile.others)):
            raise ValueError(
                f"--profile {text} does not name its device type (the cluster has {names}): measure on each type "
                "with hydragraph profile --type NAME"
            )
        profiles.append(profile)
    return Profile.merge(profiles)


def _end_with_command() -> None:
    # Wait until the command closes the pipe or dies
    sys.stdin.buffer.read()
    os._exit(1)


@uncollected()
def _help_command() -> None:
    asked = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_command, daemon=True).start()
    costs, *_ = costs_of_plan(asked, PlanInputs.read(asked), str)
    compile_other_half(costs)


if __name__ == "__main__":
    _help_command()
