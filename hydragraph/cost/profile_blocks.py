"""Memory of blocks, from a profile's linear functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hydragraph.cost.block_pieces import AUX, GRADIENT_BYTES, BlockPiece
from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.stage_kind import StageKind, StagePart


class ProfileCosts(Protocol):
    """Costs from a profile: `cost.pricing.Pricing`."""

    profile: Profile
    cluster: Cluster
    push_itemsize: int
    sizes: ModelSizes

    def pieces(self, type_: str, kind: StageKind) -> Mapping[str, BlockPiece]: ...


class ProfileBlocks:
    """Approximate memory of blocks, equal on all device types, with the interface of `CompiledBlocks`."""

    def __init__(self, costs: ProfileCosts) -> None:
        self.outline = costs.sizes.outline
        self.buckets = costs.sizes.buckets
        self.itemsize = costs.sizes.itemsize
        self.push_itemsize = costs.push_itemsize
        self.hidden_bytes = costs.sizes.hidden_bytes
        self._costs = costs
        self._templates = dict(zip(self.outline.blocks, costs.profile.blocks, strict=True))
        by_kind = costs.profile.of(next(iter(costs.cluster.types))).pieces.values()
        held = next((pieces[AUX].held for pieces in by_kind if AUX in pieces), None)
        self._aux_bytes = held.output[1] if held else 0.0

    def _piece(self, block: str, part: StagePart) -> BlockPiece:
        # Some kinds may not be measured on every type.
        kind = part.kind._replace(recompute=bool(part.recompute), sums_in_pieces=False)
        types = self._costs.cluster.types
        measured = (name for name in types if kind in self._costs.profile.of(name).pieces)
        return self._costs.pieces(next(measured, next(iter(types))), part.kind)[self._templates[block]]

    def footprint(self, block: str, part: StagePart, batch: MicroBatch) -> Footprint:
        piece = self._piece(block, part)
        tokens = batch.tokens
        lines = piece.held
        gradients = 0 if lines and lines.added else GRADIENT_BYTES * (piece.parameters - piece.frozen)
        if lines is None:
            output = 0 if block == self.outline.blocks[-1] else self.hidden_bytes * tokens
            return Footprint(output, 0, frozenset(), output, 0, gradients)
        output, saved, forward, backward = (
            max(0, round(fixed + per_token * tokens))
            for fixed, per_token in (lines.output, lines.saved, lines.forward, lines.backward)
        )
        return Footprint(output, saved, frozenset(lines.keeps), forward, backward, gradients)

    def halves(self, block: str, part: StagePart, batch: MicroBatch) -> HalvesFootprint:
        """Return an upper bound, because profiles measure unsplit backwards."""
        return self.footprint(block, part, batch).halves_estimate

    def adds(self, block: str, part: StagePart) -> bool:
        lines = self._piece(block, part).held
        return lines is not None and lines.added

    def repeated(self, block: str, kind: StageKind) -> float:
        """Estimate repeated operations by the fraction of memory that is not saved."""
        return 1.0 - kind.recompute

    def aux_bytes(self, batch: MicroBatch) -> int:
        return round(self._aux_bytes * batch.tokens)
