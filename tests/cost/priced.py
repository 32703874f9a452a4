"""A profile of a made-up model, on clusters of two types of devices, that costs are computed from."""

from __future__ import annotations

from dataclasses import replace

from hydragraph.cost.block_pieces import AUX, BlockPiece, Constants, MemoryLines, PricedDevice
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import ZERO
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.stage_kind import StageKind

HIDDEN = 512  # bytes of a token's hidden state
FAST, SLOW = Interconnect(1e12, 1e-7), Interconnect(1e11, 1e-6)


def profile(layers: int, type_: str = "", slower: float = 1.0, elements: int = 1000) -> Profile:
    """Return a profile whose backward is 2.2 times its forward, and 1.7 times in the head."""

    def pieces(tp: int, recompute: bool) -> dict[str, BlockPiece]:
        def piece(a: float, b: float, c: float, back: float, count: int) -> BlockPiece:
            forward = Constants(a / tp, b / tp, c).times(slower)
            backward = forward.times(back + recompute)
            held = MemoryLines((0.0, HIDDEN), (64.0, 900.0 / tp), (0.0, 2000.0 / tp), (0.0, 2500.0 / tp))
            return BlockPiece(forward, backward, count // tp, held=held)

        return {
            AUX: BlockPiece(Constants(0.0, 1e-9, 1e-6), ZERO),
            "embed": piece(0.0, 1e-7, 1e-5, 2.2, 4 * elements),
            "layer": piece(2e-9, 3e-6, 2e-4, 2.2, elements),
            "head": piece(0.0, 4e-6, 1e-4, 1.7, 4 * elements),
        }

    return Profile(
        f"made up for {type_ or 'all'}",
        {},
        {1: 1000, 2: 1500},
        blocks=("embed", *["layer"] * layers, "head"),
        pieces={StageKind(tp, False, again): pieces(tp, again) for tp in (1, 2, 4) for again in (False, True)},
        device=PricedDevice(type_, 1e9, 4),
        type=type_,
        sizes=ModelSizes.rough((4 * elements, *[elements] * layers, 4 * elements), HIDDEN, 4),
        update=(1e-5, 1e-9),
        commit_s=5e-5,
    )


def that_saves(profile: Profile) -> Profile:
    """Return a profile whose recomputing stages save only their inputs, and whose head returns a scalar."""

    def changed(name: str, piece: BlockPiece, recompute: bool | float) -> BlockPiece:
        held = piece.held
        if held is not None and recompute:
            held = replace(held, saved=(0.0, 0.0), keeps=("hidden",))
        if held is not None and name == "head":
            held = replace(held, output=(4.0, 0.0))
        return replace(piece, held=held)

    pieces = {
        kind: {name: changed(name, piece, kind.recompute) for name, piece in of.items()}
        for kind, of in profile.pieces.items()
    }
    return replace(profile, pieces=pieces)


def cluster(ranks: int, per_node: int | None = None, cards: int | None = None, outer: Interconnect = SLOW) -> Cluster:
    size = per_node or ranks
    node = Node("fast", size, FAST, outer, count=ranks // size, cards=cards or size)
    return Cluster.of({"fast": DeviceType(1e15, 10**9, 1e12)}, (node,))


def mixed(outer: Interconnect = SLOW) -> Cluster:
    """Return a node of two fast devices and one of two slow ones."""
    types = {"fast": DeviceType(1e15, 10**9, 1e12), "slow": DeviceType(4e14, 10**9, 1e12)}
    nodes = tuple(Node(name, 2, FAST, outer, cards=2) for name in types)
    return Cluster.of(types, nodes)


def costs(
    layers: int, where: Cluster, health: Health | None = None, elements: int = 1000, home: Home | None = None
) -> Costs:
    every = {"fast": 1.0, "slow": 2.5}
    found = [profile(layers, name, every[name], elements) for name in where.types]
    return Costs(Profile.merge(found), where, health, home=home)
