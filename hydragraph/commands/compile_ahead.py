"""Compilation of a model for strategies, without devices or weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hydragraph.commands.compile_kernels import GraphRecord, graph_records
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import footprint
from hydragraph.cost.link_bytes import traffic
from hydragraph.engine.api import RankPrograms, lower
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Block, Program, short
from hydragraph.passes.differentiate import Variant, saved_names
from hydragraph.passes.place import place
from hydragraph.passes.variants import Variants, pass_seconds
from hydragraph.passes.weight_layouts import layouts
from hydragraph.private.absent_gpu import BuiltKernel
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy

# Maximum cached variants; an evicted one would be counted twice
_KEPT = 1 << 20
# Measure saved bytes with 1,024 and 2,048 tokens
_TOKENS = 1024

Tell = Callable[[str], None]


@dataclass(frozen=True)
class VariantRecord:
    """Template (graph that equal blocks share), compiled for some ranks of a kind of stage.

    Attributes:
        name: stem of the files `graphs/{name}.forward.py` and `.backward.py`.
        indices: the ranks' positions within the stage.
        saved_bytes_per_token: bytes of saved values per token, excluding inputs and output.
    """

    name: str
    template: str
    blocks: tuple[str, ...]
    tp: int
    sequence_parallel: bool
    recompute: bool | float
    sums_in_pieces: bool
    indices: tuple[int, ...]
    forward_nodes: int
    backward_nodes: int
    saved_values: int
    saved_bytes_per_token: float
    seconds: float
    pass_seconds: Mapping[str, float]

    def __post_init__(self) -> None:
        # JSON stores tuples as lists
        for name in ("blocks", "indices"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class StrategyRecord:
    """Result of compiling one strategy.

    Attributes:
        strategy: the strategy's text with its fingerprint; the user's text if it did not compile.
        folder: folder of the strategy's files; "" if it did not compile.
        pull_bytes, push_bytes: bytes of weights and gradients between ranks in an iteration.
        problem: why it did not compile; "" if all programs are proven complete and free of deadlocks.
    """

    strategy: str
    folder: str = ""
    micro_batches: tuple[int, ...] = ()
    instructions: int = 0
    pull_bytes: int = 0
    push_bytes: int = 0
    variants: tuple[str, ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        for name in ("micro_batches", "variants"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, eq=False)
class CompiledVariant:
    """A variant's record, and its graphs before the backend compiles them."""

    record: VariantRecord
    variant: Variant


@dataclass(frozen=True, eq=False)
class CompiledStrategy:
    record: StrategyRecord
    programs: RankPrograms | None = None


@dataclass(frozen=True)
class _Need:
    block: Block
    kind: StageKind


class Compiler:
    """Compiler of one program for several strategies; each variant is compiled once.

    Args:
        backend: "eager", or "inductor", which fills Inductor's cache.
        tell: called with the name of each strategy and graph to compile.
        built: kernels for an absent GPU (`private.absent_gpu`); None: compile for this machine.
    """

    def __init__(
        self,
        program: Program,
        owners: HomeLayouts,
        backend: str,
        device: torch.device,
        tell: Tell,
        built: Mapping[str, BuiltKernel] | None = None,
    ) -> None:
        self._built = built
        self.graphs: list[GraphRecord] = []
        self.ranks = owners.ranks
        self._homes = owners.by_name(program.buckets)
        self.backend = backend
        self.device = device
        self._program = program
        self._tell = tell
        inductor = backend == "inductor"
        cache = VariantCache()
        self.traced = Variants(program, capacity=_KEPT, fused_head=inductor, added=not inductor, cache=cache)
        self._filling = (
            Variants(program, "min_cut", backend, device, _KEPT, fused_head=True, cache=cache) if inductor else None
        )
        self._known: dict[_Need, tuple[CompiledVariant, ...]] = {}
        self._first = {block.template: block for block in reversed(program.blocks)}

    @property
    def variants(self) -> tuple[CompiledVariant, ...]:
        return tuple(variant for variants in self._known.values() for variant in variants)

    def steps(self, strategies: Sequence[Strategy]) -> int:
        fitting = (strategy for strategy in strategies if strategy.layers == self._program.layers)
        return len(strategies) + len({need for strategy in fitting for need in self._needs(strategy)})

    def compile(self, strategy: Strategy, micro_batches: Sequence[int]) -> CompiledStrategy:
        """Lower a strategy, verify its programs, and compile its variants.

        Raises:
            ValueError: the strategy does not fit the model, the ranks or the micro-batches.
        """
        self._tell(strategy.name)
        # Create and verify all ranks' instructions first, which is fast.
        programs = lower(self._program, strategy, micro_batches, ranks=self.ranks)
        programs.verify()
        # Raises if a weight has no owner
        placed = layouts(self._program, strategy, self._homes)
        moved = [traffic(self._program, placed, direction).total for direction in ("pull", "push")]
        variants = [variant.record.name for need in self._needs(strategy) for variant in self._variants(need)]
        record = StrategyRecord(
            str(strategy),
            folder=_folder(strategy),
            micro_batches=tuple(micro_batches),
            instructions=programs.programs.instructions,
            pull_bytes=moved[0],
            push_bytes=moved[1],
            variants=tuple(variants),
        )
        return CompiledStrategy(record, programs)

    def _needs(self, strategy: Strategy) -> tuple[_Need, ...]:
        # needs: distinct (first block with a template, kind of stage), in stage order.
        needs: dict[_Need, None] = {}
        for stage in place(self._program.outline, strategy, [1] * len(strategy.pipelines)).stages:
            kind = stage.kind
            templates = dict.fromkeys(self._program.blocks[position].template for position in stage.positions)
            needs |= dict.fromkeys(_Need(self._first[template], kind) for template in templates)
        return tuple(needs)

    def _variants(self, need: _Need) -> tuple[CompiledVariant, ...]:
        if need not in self._known:
            self._tell(f"{need.block.name} {need.kind.text}")
            self._known[need] = tuple(self._compile(need))
        return self._known[need]

    def _compile(self, need: _Need) -> Iterator[CompiledVariant]:
        # indices: variant -> ranks of the stage with equal graphs.
        indices: dict[Variant, list[int]] = {}
        seconds: dict[Variant, float] = {}
        for part in need.kind.parts():
            began = time.perf_counter()
            variant = self.traced.get(need.block, part)
            compiled = None if self._filling is None else self._filling.get(need.block, part)
            if self._built is not None and compiled is not None and variant not in indices:
                name = f"{need.block.name}.{need.kind.text}" + (f".rank{part.index}" if indices else "")
                self.graphs += graph_records(name, part, variant, compiled, self._built)
            indices.setdefault(variant, []).append(part.index)
            seconds[variant] = seconds.get(variant, 0.0) + time.perf_counter() - began
        for variant, places in indices.items():
            name = f"{need.block.name}.{need.kind.text}" + (f".rank{places[0]}" if len(indices) > 1 else "")
            yield CompiledVariant(self._record(name, need, variant, tuple(places), seconds[variant]), variant)

    def _record(
        self, name: str, need: _Need, variant: Variant, indices: tuple[int, ...], seconds: float
    ) -> VariantRecord:
        part = StagePart(need.kind, indices[0])
        # The difference excludes values of fixed size.
        less, more = (footprint(variant, part, MicroBatch(n * _TOKENS, 1)).saved for n in (1, 2))
        return VariantRecord(
            name,
            short(need.block.template),
            tuple(block.name for block in self._program.blocks if block.template == need.block.template),
            *need.kind,
            indices=indices,
            forward_nodes=_operators(variant.forward.graph),
            backward_nodes=_operators(variant.backward.graph),
            saved_values=len({*variant.needs} & {*saved_names(len(variant.needs))}),
            saved_bytes_per_token=(more - less) / _TOKENS,
            seconds=seconds,
            pass_seconds=dict(pass_seconds(variant)),
        )


def _operators(graph: torch.fx.Graph) -> int:
    return sum(node.op in ("call_function", "call_method") for node in graph.nodes)


def _folder(strategy: Strategy) -> str:
    name = "".join(c if c.isalnum() else "-" for c in strategy.name)
    short = "-".join(part for part in name.split("-") if part)[:60].rstrip("-")
    return f"{short}-{strategy.fingerprint}"
