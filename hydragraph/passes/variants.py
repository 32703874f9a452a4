"""Cache of compiled templates by tensor-parallel degree and local shapes."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Block, Program, Template
from hydragraph.ir.program_outline import Purpose, mode_of
from hydragraph.log import doing
from hydragraph.passes.bind import bind
from hydragraph.passes.differentiate import Variant, start_of
from hydragraph.passes.graph_passes import make_variant
from hydragraph.passes.place import place
from hydragraph.passes.recently_used import LRU
from hydragraph.passes.scoring_head import scoring_program
from hydragraph.passes.shard import gradient_kinds
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

CPU = torch.device("cpu")
# Large enough: a model has about three templates, and strategies few degrees
CAPACITY = 64


_shared: WeakValueDictionary[Hashable, Variant] = WeakValueDictionary()
# By graph pass
_seconds: WeakKeyDictionary[Variant, Mapping[str, float]] = WeakKeyDictionary()
_bound: WeakKeyDictionary[Variant, dict[torch.device, Variant]] = WeakKeyDictionary()


class Library(Protocol):
    """Source of traced, uncompiled variants; `str` returns the source's location."""

    def variant(self, spec: VariantSpec) -> Variant | None: ...

    def source(self, spec: VariantSpec) -> str:
        """Return an identifier of a spec's stored variant, or ""."""


class Cache(Protocol):
    def variant(self, spec: VariantSpec) -> Variant | None: ...

    def has(self, spec: VariantSpec) -> bool: ...

    def keep(self, spec: VariantSpec, variant: Variant) -> None: ...


class Variants:
    """Variants of one program that this process has compiled.

    Args:
        partitioner, backend, fused_head, added: as in `VariantSpec`.
        device: device to which `get` binds eager graphs, which are cached for the CPU.
        cache: store of new variants, searched after `library`.
    """

    def __init__(
        self,
        program: Program,
        partitioner: str = "min_cut",
        backend: str = "eager",
        device: torch.device = CPU,
        capacity: int = CAPACITY,
        fused_head: bool = False,
        added: bool = False,
        library: Library | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.program = program
        self._library = library
        self._cache = cache
        self._lacking = set[StageKind]()
        self._backend = backend
        self._device = device
        self._options: dict[str, Any] = {"partitioner": partitioner, "fused_head": fused_head, "added": added}
        made_for = None if backend == "eager" else device
        self._how = (partitioner, backend, made_for, fused_head, program.dtype)
        self._known = LRU[Hashable, Variant](capacity)
        self.strategies: set[Strategy] = set()
        self._scoring: dict[bool, Variants] = {}
        self._kinds: dict[tuple[str, StageKind], Mapping[str, GradientKind]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _shared.update(self._known.items())

    def __len__(self) -> int:
        return len(self._known)

    def get(self, block: Block, part: StagePart) -> Variant:
        spec = self.spec(block, part)
        key = self._key(spec)

        def make() -> Variant:
            variant = _shared.get(key)
            if variant is None:
                variant = _shared[key] = self._made(spec)
            else:
                _LOG.info("reused %s, which this process had compiled, for %s", block.name, _form(part))
            return variant

        variant = self._known.get(key, make)
        return variant if self._backend != "eager" else _on(variant, self._device)

    def traced(self, block: Block, part: StagePart) -> bool:
        spec = self.spec(block, part)
        return self._key(spec) in _shared or (self._cache is not None and self._cache.has(spec))

    def _key(self, spec: VariantSpec) -> Hashable:
        # Ranks with equal shards share a variant, so the key has shapes, not the index.
        how = (spec.learning, self._how, spec.passes)
        # Stored and traced graphs have different keys: a check may compare both.
        source = "" if self._library is None else self._library.source(spec)
        return (spec.template.content, spec.shards, spec.part.kind, *how, source)

    @property
    def portable(self) -> bool:
        """Whether variants can be made in one process and run in another."""
        return self._backend == "eager"

    def lacks(self, strategies: Iterable[Strategy]) -> bool:
        """Return whether this process must compile variants for the strategies."""
        return any(
            self._key(self.spec(block, part)) not in _shared
            for strategy in strategies
            for block, part in self._parts(strategy)
        )

    def on(self, device: torch.device) -> Variants:
        """Return the eager variants for another device, which share the cached graphs."""
        assert self.portable, "compiled code runs only on the device that it was compiled for"
        return self._changed(_device=device)

    def scoring(self, entropy: bool = False) -> Variants:
        """Return variants whose last block computes log-probabilities."""
        if entropy not in self._scoring:
            self._scoring[entropy] = self.of(scoring_program(self.program, entropy))
        return self._scoring[entropy]

    def for_purpose(self, purpose: Purpose) -> Variants:
        return self if mode_of(purpose) == purpose else self.scoring(purpose == "score_entropy")

    def of(self, program: Program) -> Variants:
        return self._changed(program=program)

    def _changed(self, **attributes: object) -> Variants:
        other = copy.copy(self)
        vars(other).update(attributes, _scoring={})
        return other

    def adopt(self, others: Variants) -> None:
        """Add variants that another process made for this program."""
        for key, variant in others._known.items():
            self._known.get(key, lambda v=variant: v)
        self._kinds.update(others._kinds)
        self.strategies.update(others.strategies)

    def compile(self, strategies: Iterable[Strategy]) -> None:
        for strategy in strategies:
            self.strategies.add(strategy)
            for block, part in self._parts(strategy):
                self.get(block, part)
                self.kinds(block, part)

    def _parts(self, strategy: Strategy) -> Iterator[tuple[Block, StagePart]]:
        # Variants do not depend on micro-batch counts.
        placement = place(self.program.outline, strategy, [1] * len(strategy.pipelines))
        for at, part in dict.fromkeys((s.positions, s.part_of(rank)) for rank, s in placement.stage_of.items()):
            for position in at:
                yield self.program.blocks[position], part

    def form(self, block: Block) -> Hashable:
        """Return a key that is equal for blocks with equal variants in every stage."""
        parameters = (self.program.parameters[name] for name in block.parameters)
        return block.template, tuple((p.shape, p.rule) for p in parameters), self._learning(block)

    def spec(self, block: Block, part: StagePart) -> VariantSpec:
        template = self.program.templates[block.template]
        parameters = local_parameters(self.program, block, template)
        target: dict[str, Any] = {"backend": self._backend, "device": self._device, "where": block.name}
        options = self._options | target
        return VariantSpec(template, parameters, part, self.program.dtype, self._learning(block), **options)

    def _made(self, spec: VariantSpec) -> Variant:
        began = time.perf_counter()
        traced = self._looked_up(spec)
        source = str(self._library)
        if traced is None and self._cache is not None:
            traced = self._cache.variant(spec)
            source = str(self._cache)
        if traced is None or self._backend != "eager":
            doing(f"compiling the model's blocks for {_form(spec.part)}")
        variant = self._compile(spec, traced)
        verb, origin = ("compiled", "") if traced is None else ("took", f" from {source}")
        took = time.perf_counter() - began
        _LOG.info("%s %s (%s) for %s%s in %.2f s", verb, spec.where, self._backend, _form(spec.part), origin, took)
        return variant

    def _compile(self, spec: VariantSpec, traced: Variant | None) -> Variant:
        variant, seconds = make_variant(spec, traced, None if self._cache is None else self._cache.keep)
        _seconds[variant] = seconds
        parts = ", ".join(f"{name} {took:.3f} s" for name, took in seconds.items())
        if seconds:
            _LOG.info("compiled %s for rank %d of %d: %s", spec.where, spec.part.index, spec.part.tp, parts)
        return variant

    def _looked_up(self, spec: VariantSpec) -> Variant | None:
        if self._library is None:
            return None
        variant = self._library.variant(spec)
        if variant is None and spec.part.kind not in self._lacking:
            self._lacking.add(spec.part.kind)
            _LOG.warning("%s has no graphs for <%s>: they are compiled now", self._library, spec.part.kind.text)
        return variant

    def _learning(self, block: Block) -> frozenset[str]:
        local = self.program.templates[block.template].parameters
        names = {n for n, name in zip(local, block.parameters, strict=True) if name in self.program.learning}
        outline = self.program.outline
        return frozenset(names | ({"hidden"} if outline.index[block.name] > outline.lowest else set()))

    def kinds(self, block: Block, part: StagePart) -> Mapping[str, GradientKind]:
        key = (block.template, part.kind._replace(recompute=False))
        if key not in self._kinds:
            template = self.program.templates[block.template]
            parameters = local_parameters(self.program, block, template)
            self._kinds[key] = gradient_kinds(template, parameters, part)
        return self._kinds[key]


def _on(variant: Variant, device: torch.device) -> Variant:
    if device.type == "cpu":
        return variant
    bound = _bound.setdefault(variant, {})
    if device not in bound:
        bound[device] = bind(variant, device)
    return bound[device]


def _form(part: StagePart) -> str:
    return ", ".join([f"rank {part.index} of tp{part.tp}", *part.kind.marks])


def local_parameters(program: Program, block: Block, template: Template) -> Mapping[str, Parameter]:
    return {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}


def pass_seconds(variant: Variant) -> Mapping[str, float]:
    """Return the seconds of each graph pass, or {} if another process made the variant."""
    return _seconds.get(variant, {})


def vocabulary_starts(variant: Variant, parameters: Mapping[str, Parameter], part: StagePart) -> dict[str, Tensor]:
    """Return the first row (0-d int64) of each of a rank's vocabulary shards, by input name."""
    rules = {name: parameters[name].rule for name in variant.vocabulary}
    firsts = {name: rule.units(0, part.tp, part.index)[0] * rule.unit for name, rule in rules.items() if rule}
    return {start_of(name): torch.tensor(first) for name, first in firsts.items()}
