"""`hydragraph plan --cluster`: which devices of a cluster do what, when they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.memory import Compiled
    from hydragraph.cost.profile import Profile
    from hydragraph.planner.uneven.planning import Plan
    from hydragraph.planner.workload import Workload
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Strategy

Say = Callable[[str], None]

# Tokens of a sample mini-batch, where nothing says how many.
TOKENS = 100_000


@dataclass(frozen=True)
class Work:
    """What there is to train, as the command line says it; what it does not say, the run's config does.

    Attributes:
        sequences, length: how many of how many tokens.
        lengths: a file of sequence lengths to draw sample mini-batches from instead.
        tokens: per iteration.
        context: longer sequences of the file count as cut.
        iterations, seed: how many mini-batches are drawn, and how.
    """

    sequences: int | None = None
    length: int | None = None
    lengths: Path | None = None
    tokens: int | None = None
    context: int | None = None
    iterations: int = 4
    seed: int = 0

    def read(self, config: TrainConfig | None) -> Workload:
        """Return the workload.

        Raises:
            ValueError: too little is said, or too much.
        """
        from hydragraph.planner.explain import mini_batches
        from hydragraph.planner.workload import Workload
        from hydragraph.train.plan_input import read_lengths

        tokens = self.tokens or (config.data.tokens_per_step if config else None)
        longest = config.data.max_length if config else None
        if self.lengths is not None:
            if self.sequences or self.length:
                raise ValueError("--lengths draws mini-batches; leave out --sequences and --length")
            limit = self.context or longest
            data = [min(n, limit or n) for n in read_lengths(self.lengths) if n]
            if not data:
                raise ValueError(f"{self.lengths}: all sequences are empty; give lengths above 0")
            return Workload(lengths=mini_batches(data, tokens or TOKENS, self.iterations, self.seed))
        if self.context:
            raise ValueError("--context cuts the sequences of --lengths; for equal ones give --length")
        if self.sequences and self.tokens:
            raise ValueError("--sequences and --tokens both say how much an iteration has: give one of them")
        length = self.length or longest
        if length is None or not (self.sequences or tokens):
            raise ValueError(
                "what is there to train? Give --sequences 128 --length 2048, or --lengths with a file of lengths, or "
                "--model with a run's config, which says both"
            )
        return Workload(self.sequences or -(-(tokens or 0) // length), length)


def read_costs(
    cluster: Cluster,
    config: TrainConfig | None,
    profiles: Sequence[str],
    health: Path | None,
    efficiency: float | None,
    home: str | None,
    say: Say,
) -> tuple[Costs, str]:
    """Return what prices plans, and a sentence on where its numbers come from.

    Args:
        config: of a run with the model, from which memory is exact; None: the profiles alone.
        profiles: as measured, of all types of devices; none: a datasheet.
        home: who owns the state now; None: as the config says, or equal shares.
        say: told what is under way.

    Raises:
        ValueError: too little is given, or it does not fit together.
    """
    from hydragraph.commands.captured import captured
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.datasheet import EFFICIENCY, datasheet
    from hydragraph.cost.memory import CompiledBlocks
    from hydragraph.spec.health import Health
    from hydragraph.spec.home import Home

    if config is None and not profiles:
        raise ValueError(
            "--cluster needs --model with a run's config, priced by datasheet, or --profile with what hydragraph "
            "profile measured on each type of device; or both"
        )
    if profiles and efficiency is not None:
        raise ValueError("--profile has measured seconds and --efficiency prices a datasheet: give one of them")
    rates = None if health is None else Health.load(health)
    owners = Home.parse(home) if home is not None else Home(copies=config.home.copies) if config else Home()
    measured = _merged(profiles, cluster) if profiles else None
    if config is None:
        assert measured is not None, "there is a profile or a model"
        costs = Costs(measured, cluster, rates, home=owners)
        return costs, f"{costs.source}; memory by what the profile says of blocks"
    say("capturing the model")
    _, program, variants = captured(config)
    if measured is None:
        # No group is larger than a node.
        most = max(cluster.node(device.node).devices for device in cluster.devices)
        measured = datasheet(program, cluster, efficiency or EFFICIENCY, range(1, most + 1))
    elif len(measured.blocks) != len(program.blocks):
        raise ValueError(
            f"profile {measured.name} is of a model of {len(measured.blocks)} blocks, but that of --model has "
            f"{len(program.blocks)}: measure this model with hydragraph profile"
        )
    blocks = CompiledBlocks(program, _told(variants.get, say))
    costs = Costs(measured, cluster, rates, home=owners, blocks=blocks)
    return costs, f"{costs.source}; memory by the sizes of compiled graphs"


def _told(compiled: Compiled, say: Say) -> Compiled:
    """Say when a graph is asked for that was not yet, which takes a while."""
    known: set[object] = set()

    def get(block: Any, part: Any) -> Any:
        key = (block.template, part)
        if key not in known:
            known.add(key)
            say(f"compiling graphs for their memory: {block.template}, tensor-parallel degree {part.kind.tp}")
            found = compiled(block, part)
            say("searching")
            return found
        return compiled(block, part)

    return get


def _merged(texts: Sequence[str], cluster: Cluster) -> Profile:
    """Return what was measured on the cluster's types of devices.

    Raises:
        ValueError: a profile does not say on which type it was measured, and there are several.
    """
    from hydragraph.cost.profile import Profile
    from hydragraph.train.plan_input import read_profile

    several = len(cluster.types) > 1 or len(texts) > 1
    found = []
    for text in texts:
        profile = read_profile(text)
        if several and any(not part.type for part in (profile, *profile.others)):
            raise ValueError(
                f"--profile {text}: it names no type of device, and the cluster has {', '.join(cluster.types)}: measure "
                "on each type with hydragraph profile --type NAME"
            )
        found.append(profile)
    return Profile.merge(found)


def read_running(text: str, costs: Costs) -> Strategy:
    """Read the strategy that runs now, a text or a YAML file, and check it against model and cluster.

    Raises:
        ValueError: it is for others.
    """
    from hydragraph.spec.strategy import Strategy

    try:
        is_file = text.endswith((".yaml", ".yml"))
        strategy = Strategy.load(text) if is_file else Strategy.parse(text, costs.outline.layers)
        strategy.check(costs.outline.layers, costs.ranks)
    except ValueError as error:
        raise ValueError(f"--running: {error}") from None
    return strategy


def write_strategies(plan: Plan, path: Path) -> str:
    """Write what `hydragraph train` takes: the plan's strategy, and further candidates in files beside it.

    Returns:
        how to train with it.
    """
    names = [path.with_stem(f"{path.stem}-{i}") if i > 1 else path for i in range(1, len(plan.strategies) + 1)]
    for name, strategy in zip(names, plan.strategies, strict=True):
        strategy.save(name)
    listed = ", ".join(map(str, names))
    choose = " --set plan.choose=true" if len(names) > 1 else ""
    return (
        f"{listed}: in a run's config, strategies: [{listed}], home: {str(plan.home)!r}, ranks: {len(plan.memory)}; or "
        f"hydragraph train config.yaml --set 'strategies={_list(names)}' --set 'home={plan.home}' "
        f"--set ranks={len(plan.memory)}{choose}"
    )


def _list(paths: Sequence[Path]) -> str:
    return "[" + ", ".join(f'"{path}"' for path in paths) + "]"


def to_record(plan: Plan, source: str) -> dict[str, Any]:
    """Return a plan as JSON holds it; seconds of what does not fit are null."""
    return {
        "strategy": plan.strategy.name,
        "home": str(plan.home),
        "strategies": [strategy.name for strategy in plan.strategies],
        "micro_batches": list(plan.assignment.counts),
        "seconds": _finite(plan.seconds),
        "simulated": plan.simulated,
        "bound": plan.bound,
        "gap": _finite(plan.gap),
        "memory": list(plan.memory),
        "limits": list(plan.limits),
        "moved_bytes": plan.moved_bytes,
        "origin": plan.origin,
        "rivals": [
            {"strategy": r.strategy.name, "seconds": _finite(r.seconds), "origin": r.origin, "why": r.why}
            for r in plan.rivals
        ],
        "took_s": plan.took_s,
        "source": source,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
