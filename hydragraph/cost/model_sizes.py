"""Model sizes stored in a profile, so that its file suffices to price the traffic of a strategy.

Plain data: planning processes read profiles without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydragraph.ir.parameter import Bucket
    from hydragraph.ir.program import Program
    from hydragraph.ir.program_outline import Outline


@dataclass(frozen=True)
class RuleText:
    """How tensor parallelism cuts a parameter: the fields of `ir.parameter.ShardRule`."""

    dim: int
    segments: tuple[int, ...]
    unit: int = 1
    heads: bool = False


@dataclass(frozen=True)
class Tensor:
    """A parameter: its name, shape, and cut (None: every rank of a stage holds all of it)."""

    name: str
    shape: tuple[int, ...]
    rule: RuleText | None = None


@dataclass(frozen=True)
class Weights:
    """Parameters that travel together: the fields of `ir.parameter.Bucket`."""

    name: str
    tensors: tuple[Tensor, ...]
    blocks: tuple[str, ...]
    learns: bool = True


@dataclass(frozen=True)
class ModelSizes:
    """A model's blocks and buckets.

    Attributes:
        blocks: their names, in order.
        weights: its buckets.
        hidden_bytes: of one token's hidden state, which stages send each other.
        itemsize: bytes of an element in the compute dtype, which is also that of pulled weights.
        heads: query head counts; a tensor-parallel degree must divide each of them.
        sequences: whether it accepts several sequences in a micro-batch.
    """

    blocks: tuple[str, ...]
    weights: tuple[Weights, ...]
    hidden_bytes: int
    itemsize: int
    heads: tuple[int, ...] = ()

    @classmethod
    def of(cls, program: Program) -> ModelSizes:
        """Return the sizes of a captured model."""
        from hydragraph.cost.footprint import token_bytes

        weights = []
        for bucket in program.buckets:
            tensors = []
            for p in bucket.parameters:
                cut = p.rule
                rule = RuleText(cut.dim, tuple(cut.segments), cut.unit, cut.heads) if cut is not None else None
                tensors.append(Tensor(p.name, tuple(map(int, p.shape)), rule))
            weights.append(Weights(bucket.name, tuple(tensors), tuple(bucket.blocks), bucket.learns))
        first = program.templates[program.blocks[0].template].graph
        blocks = tuple(block.name for block in program.blocks)
        return cls(blocks, tuple(weights), token_bytes(first), program.dtype.itemsize, tuple(program.heads))

    @classmethod
    def rough(cls, sizes: tuple[int, ...], hidden_bytes: int, itemsize: int) -> ModelSizes:
        """Return a model with only the elements of each block known: all of them cut evenly."""
        # Cut evenly along one dimension: names and shapes are unknown, only the volume matters.
        last = len(sizes) - 1
        names = tuple("embed" if i == 0 else "head" if i == last else f"layer.{i - 1}" for i in range(len(sizes)))
        weights = tuple(
            Weights(name, (Tensor(f"{name}.weight", (size,), RuleText(0, (size,))),), (name,))
            for name, size in zip(names, sizes, strict=True)
            if size
        )
        return cls(names, weights, hidden_bytes, itemsize)

    def outline(self) -> Outline:
        """Return the outline that rank programs are built from."""
        from hydragraph.ir.program_outline import Outline

        # Buckets that no block uses have a home, but are never pulled or pushed.
        used = [w for w in self.weights if w.blocks]
        return Outline(
            self.blocks,
            tuple((w.name, w.blocks) for w in used),
            tuple(w.name for w in used if not w.learns),
            tuple(bucket.size for bucket in self._buckets if bucket.blocks),
        )

    def buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets in the form that links need; the same objects on every call."""
        return self._buckets

    @cached_property
    def _buckets(self) -> tuple[Bucket, ...]:
        from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

        buckets = []
        for weights in self.weights:
            parameters = tuple(
                Parameter(
                    t.name, t.shape, rule=ShardRule(**asdict(t.rule)) if t.rule else None, trainable=weights.learns
                )
                for t in weights.tensors
            )
            buckets.append(Bucket(weights.name, parameters, weights.blocks, weights.learns))
        return tuple(buckets)

    def allows(self, tp: int) -> bool:
        """Return whether a tensor-parallel degree shards the query heads and every head of keys and values."""
        return all(count % tp == 0 for count in self.heads) and all(
            parameter.rule is None or parameter.rule.allows(tp)
            for bucket in self._buckets
            for parameter in bucket.parameters
        )

    def to_record(self) -> dict[str, Any]:
        """Return a JSON value."""
        return asdict(self)

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> ModelSizes:
        """Read the result of `to_record`."""
        weights = []
        for record in data["weights"]:
            tensors = tuple(
                Tensor(
                    t["name"],
                    tuple(t["shape"]),
                    t["rule"] and RuleText(**{**t["rule"], "segments": tuple(t["rule"]["segments"])}),
                )
                for t in record["tensors"]
            )
            weights.append(Weights(record["name"], tensors, tuple(record["blocks"]), record["learns"]))
        return cls(
            tuple(data["blocks"]), tuple(weights), data["hidden_bytes"], data["itemsize"], tuple(data.get("heads", ()))
        )
