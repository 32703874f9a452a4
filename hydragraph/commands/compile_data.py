"""Sizes of a model and its compiled blocks, stored for `hydragraph show DIR`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydragraph.cost.block_pieces import MemoryLines
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES
from hydragraph.spec.home import Home
from hydragraph.spec.record import from_record
from hydragraph.spec.stage_kind import StageKind, StagePart

if TYPE_CHECKING:
    from hydragraph.commands.compile_ahead import CompiledVariant
    from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
    from hydragraph.ir.parameter import Bucket
    from hydragraph.ir.program import Program
    from hydragraph.ir.program_outline import Outline

DATA = Path("strategies") / "model.json"
Line = tuple[float, float]  # constant bytes, and bytes per token


@dataclass(frozen=True)
class BlockData:
    """Memory and communication of a block compiled for one kind of stage.

    Attributes:
        gradients: bytes of the parameters' gradients from one micro-batch.
        sent: bytes that a rank sends for tensor-parallel sums.
    """

    kind: str
    indices: tuple[int, ...]
    held: MemoryLines
    gradients: int
    sent: Line


@dataclass(frozen=True)
class ModelData:
    """A model's sizes and the memory of its blocks.

    Attributes:
        replicas: kind of stage -> parameters whose gradient is equal on all ranks of the stage.
    """

    sizes: ModelSizes
    home: str
    ranks: int
    templates: Mapping[str, str]
    blocks: Mapping[str, Sequence[BlockData]]
    aux: Line
    replicas: Mapping[str, Sequence[str]]

    def save(self, folder: Path) -> None:
        record = {**asdict(self), "sizes": self.sizes.to_record()}
        (folder / DATA).write_text(json.dumps(record) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ModelData:
        path = folder / DATA
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            blocks = {
                name: tuple(from_record(BlockData, record, f"blocks.{name}") for record in variants)
                for name, variants in data.pop("blocks").items()
            }
            return cls(**{**data, "sizes": ModelSizes.from_record(data["sizes"]), "blocks": blocks})
        except FileNotFoundError:
            raise ValueError(f"{path} is missing: write the folder again with hydragraph compile") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): write the folder again with hydragraph compile"
            ) from None

    @cached_property
    def outline(self) -> Outline:
        return self.sizes.outline

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        return self.sizes.buckets

    @property
    def owners(self) -> Home:
        return Home.parse(self.home)

    def block(self, name: str, part: StagePart) -> BlockData:
        for variant in self.blocks[self.templates[name]]:
            if variant.kind == part.kind.text and part.index in variant.indices:
                return variant
        raise ValueError(f"{DATA} does not describe {name} in {part}: write the folder again with hydragraph compile")


class RecordedBlocks:
    """Implementation of `cost.rank_memory.Blocks` for a compiled folder."""

    def __init__(self, data: ModelData) -> None:
        self._data = data
        self.outline = data.outline
        self.buckets = data.buckets
        self.itemsize = data.sizes.itemsize
        self.push_itemsize = GRADIENT_BYTES
        self.hidden_bytes = data.sizes.hidden_bytes

    def footprint(self, block: str, part: StagePart, batch: MicroBatch) -> Footprint:
        from hydragraph.cost.footprint import Footprint

        block_data = self._data.block(block, part)
        lines = block_data.held
        sizes = (at(line, batch.tokens) for line in (lines.output, lines.saved, lines.forward, lines.backward))
        output, saved, forward, backward = sizes
        gradients = 0 if lines.added else block_data.gradients
        return Footprint(output, saved, frozenset(lines.keeps), forward, backward, gradients)

    def halves(self, block: str, part: StagePart, batch: MicroBatch) -> HalvesFootprint:
        """See `Blocks`; the result is an upper bound."""
        return self.footprint(block, part, batch).halves_estimate

    def adds(self, block: str, part: StagePart) -> bool:
        return self._data.block(block, part).held.added

    def aux_bytes(self, batch: MicroBatch) -> int:
        return at(self._data.aux, batch.tokens)


def at(line: Sequence[float], tokens: int) -> int:
    return max(0, round(line[0] + line[1] * tokens))


def model_data(program: Program, variants: Sequence[CompiledVariant], home: Home, ranks: int) -> ModelData:
    from hydragraph.cost.footprint import MicroBatch
    from hydragraph.cost.graph_footprint import made_bytes

    aux = program.templates[program.aux.template].graph
    templates = {block.name: block.template for block in program.blocks}
    blocks: dict[str, list[BlockData]] = {}
    for compiled in variants:
        blocks.setdefault(templates[compiled.record.blocks[0]], []).append(_block(compiled))
    kinds = {_kind(compiled) for compiled in variants}
    return ModelData(
        ModelSizes.of(program),
        str(home),
        ranks,
        templates,
        blocks,
        _line(*(made_bytes(aux, MicroBatch(tokens, 1)) for tokens in _TOKENS)),
        {kind.text: tuple(_replicas(program, kind)) for kind in sorted(kinds) if kind.tp > 1},
    )


_TOKENS = (1024, 2048)  # sizes of the two micro-batches that determine a `Line`


def _line(first: int, second: int, small: int = _TOKENS[0], large: int = _TOKENS[1]) -> Line:
    slope = (second - first) / (large - small)
    return first - slope * small, slope


def _kind(compiled: CompiledVariant) -> StageKind:
    record = compiled.record
    return StageKind(record.tp, record.sequence_parallel, record.recompute, record.sums_in_pieces)


def _block(compiled: CompiledVariant) -> BlockData:
    from hydragraph.cost.collective_bytes import collective_bytes
    from hydragraph.cost.footprint import MicroBatch
    from hydragraph.cost.graph_footprint import footprint, held_by

    part = StagePart(_kind(compiled), compiled.record.indices[0])
    tokens = [per_rank * part.tp for per_rank in _TOKENS]
    sent = [collective_bytes(compiled.variant, part, MicroBatch(count, 1)) for count in tokens]
    return BlockData(
        part.kind.text,
        compiled.record.indices,
        held_by(compiled.variant, part),
        footprint(compiled.variant, part, MicroBatch(tokens[0], 1)).gradients,
        _line(sent[0], sent[1], tokens[0], tokens[1]),
    )


def _replicas(program: Program, kind: StageKind) -> Iterator[str]:
    from hydragraph.ir.layout import GradientKind
    from hydragraph.passes.weight_layouts import bucket_kinds, kinds_once

    kinds_of = kinds_once(program)
    for bucket in program.buckets:
        if bucket.blocks and bucket.learns:
            kinds = bucket_kinds(program, bucket, StagePart(kind), kinds_of)
            yield from (p.name for p in bucket.parameters if p.rule is None and kinds[p.name] is GradientKind.REPLICA)


def placed_layouts(data: ModelData, strategy: Any) -> list[Any]:
    from hydragraph.ir.home_layout import HomeLayouts
    from hydragraph.ir.layout import GradientKind, Layout, propagation
    from hydragraph.passes.place import place
    from hydragraph.passes.weight_layouts import BucketLayouts

    owners = HomeLayouts(data.owners, data.ranks)
    placement = place(data.outline, strategy, [1] * len(strategy.pipelines))
    holders = dict(placement.holders)
    replicas = {kind: frozenset(names) for kind, names in data.replicas.items()}
    layouts: dict[object, Layout] = {}
    placed = []
    for bucket in data.buckets:
        stages = holders.get(bucket.name, ())
        kinds = []
        for members in stages:
            same = replicas.get(placement.stage_of[members[0]].kind.text, frozenset())
            kind_of = {True: GradientKind.REPLICA, False: GradientKind.PARTIAL}
            kinds.append({p.name: kind_of[p.name in same] for p in bucket.parameters})
        key = (bucket.form, stages, tuple(tuple(stage_kinds.values()) for stage_kinds in kinds))
        if key not in layouts:
            layouts[key] = propagation(bucket, stages, kinds)
        placed.append(BucketLayouts(bucket, owners.of(bucket), layouts[key]))
    return placed
