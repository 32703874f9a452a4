"""The Llamas and the cluster of the Hydraulis paper (8.1): published constants, and what they leave out.

Published are seconds of a stage by scheme, and a memory model. Not published, and taken from data sheets or assumed:

- links: 200 GB/s from one A800 to another of its node (NVLink, 400 GB/s both ways together) and 25 GB/s through each
  of a node's eight network cards (200 GB/s together, as the paper says); 5 and 10 microseconds for a message to start;
- weights: 12 hidden^2 elements per layer, pulled in 16 bits and pushed in 32; AdamW reads and writes 28 bytes per
  element at 2.04 TB/s;
- <tp1,pp1> of 7B, which HotSPa uses: twice the stage of <tp1,pp2>. Where <tp2,pp1> and <tp2,pp2> were both measured,
  twice the latter is within 2 % of the former.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import hydragraph as hg
from benchmarks.published.workload import FORWARD
from hydragraph.cost.actors import stage_actors
from hydragraph.cost.block_pieces import BlockPiece, PricedDevice
from hydragraph.cost.costed_work import CostedWork
from hydragraph.cost.costs import Costs
from hydragraph.cost.curves import Constants
from hydragraph.cost.instruction_work import ExcludedCosts, Part
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.published_memory import MemoryModel
from hydragraph.cost.timeline import Timeline, run
from hydragraph.cost.traffic import Transfers
from hydragraph.engine.candidate_strategies import strategy_of
from hydragraph.ir.instruction import Op
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, DeviceType, Interconnect, Node
from hydragraph.spec.stage_kind import StageKind

MODELS = ("7b", "13b", "32b")
A800 = DeviceType(312e12, 80 * 10**9, 2.04e12)
PER_NODE = 8
INNER = Interconnect(200e9, 5e-6)
CARD = Interconnect(25e9, 1e-5)
BYTES = 2  # of a weight or a hidden value while computing
UPDATED = 28  # bytes that AdamW reads and writes per element


def read_profiles(path: Path, models: Sequence[str] = MODELS) -> dict[str, Profile]:
    """Read the models' published constants, by name."""
    entries = {entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["profiles"]}
    return {model: Profile.from_constants(entries[f"llama-{model}-a800-80g"]) for model in models}


def completed(profile: Profile) -> Profile:
    """Return the profile with <tp1,pp1>, and without a constant for pull and push, which `Costs` prices."""
    schemes = dict(profile.schemes)
    if (1, 1) not in schemes and (1, 2) in schemes:
        schemes[1, 1] = schemes[1, 2].times(2)
    return replace(profile, schemes=schemes, hetero_sync_s=0.0)


def model_of(profile: Profile) -> MemoryModel:
    """Return the sizes that the memory model is about."""
    if profile.memory is None:
        raise ValueError(f"profile {profile.name} has no memory model: use published constants")
    return profile.memory


def layer_elements(profile: Profile) -> int:
    """Return the weights of a layer: 4 hidden^2 of attention and 8 of the feed-forward network."""
    return 12 * model_of(profile).hidden ** 2


def elements(profile: Profile) -> int:
    """Return the weights of the model."""
    model = model_of(profile)
    return model.layers * layer_elements(profile) + 2 * model.hidden * model.vocab


def cluster(devices: int) -> Cluster:
    """Return so many A800s in nodes of eight."""
    if devices < PER_NODE:
        raise ValueError(f"{devices} devices: the paper's nodes have {PER_NODE}")
    return Cluster.of({"a800": A800}, (Node("a800", PER_NODE, INNER, CARD, count=devices // PER_NODE, cards=8),))


@cache
def costs_of(profile_name: str, devices: int) -> Costs:
    """Return the costs of a profile that was passed to `known` before."""
    return Costs(with_blocks(_KNOWN[profile_name]), cluster(devices))


_KNOWN: dict[str, Profile] = {}


def known(profile: Profile, devices: int) -> Costs:
    """Return the costs of a profile on so many devices, the same object each time: it remembers what it has priced."""
    _KNOWN[profile.name] = profile
    return costs_of(profile.name, devices)


def with_blocks(profile: Profile) -> Profile:
    """Return the profile as blocks: a layer is its part of the shallowest measured pipeline of its degree.

    Embedding and head have weights, but no seconds of their own: those of a stage contain them.
    """
    model = model_of(profile)
    embedding = model.hidden * model.vocab
    pieces = {}
    for tp in sorted({tp for tp, _ in profile.schemes}):
        depth = min(pp for degree, pp in profile.schemes if degree == tp)
        layer = profile.schemes[tp, depth].times(depth / model.layers)
        forward, backward = layer.times(FORWARD), layer.times(1 - FORWARD)
        nothing = Constants(0.0, 0.0, 0.0)
        pieces[StageKind(tp)] = {
            "vocabulary": BlockPiece(nothing, nothing, parameters=embedding // tp),
            "layer": BlockPiece(forward, backward, parameters=layer_elements(profile) // tp),
        }
    sizes = (embedding, *[layer_elements(profile)] * model.layers, embedding)
    return replace(
        profile,
        blocks=("vocabulary", *["layer"] * model.layers, "vocabulary"),
        pieces=pieces,
        device=PricedDevice("a800", float(A800.memory_bytes), BYTES),
        sizes=ModelSizes.rough(sizes, BYTES * model.hidden, BYTES),
        limits=profile.limits,
        update=(0.0, UPDATED / A800.memory_bytes_per_s),
        type="a800",
    )


def strategy(schemes: Sequence[Scheme], profile: Profile) -> hg.Strategy:
    """Return the pipelines on devices 0, 1, ...: the highest degrees first, so that none spans nodes needlessly."""
    return strategy_of(ordered(schemes), model_of(profile).layers)


def ordered(schemes: Sequence[Scheme]) -> tuple[Scheme, ...]:
    """Return a strategy's schemes, the highest tensor-parallel degrees first."""
    return tuple(sorted(schemes, reverse=True))


class SchemeWork(CostedWork):
    """Work whose computation is that of the published scheme: a third of a stage's seconds forward, by layer."""

    def __init__(self, costs: Costs, profile: Profile, chosen: hg.Strategy, assignment: Assignment) -> None:
        super().__init__(costs, chosen, assignment)
        self._whole = profile

    def computing(self, op: Op, block: str, ranks: Sequence[int], micro_batches: Sequence[int]) -> Sequence[float]:
        """See `cost.instruction_work.InstructionCosts`."""
        stage = self._where[ranks[0]]
        if not block.startswith("layer."):
            return [0.0] * len(micro_batches)
        (role,) = stage.roles  # published schemes share no stages
        depth = len(self._strategy.pipelines[role.pipeline].stages)
        cost = self._whole.pipeline((len(stage.ranks), depth), self._costs.ranks)
        ((first, end),) = stage.layers
        part = (FORWARD if op is Op.FORWARD else 1 - FORWARD) / (end - first)
        return [part * cost.micro_batch_seconds(m) for m in self._lengths[role.pipeline]]


def simulated(
    costs: Costs, profile: Profile, chosen: hg.Strategy, assignment: Assignment, without: Sequence[Part] = ()
) -> Timeline:
    """Simulate an iteration by the published scheme's seconds, everything else from `costs`."""
    work = ExcludedCosts(SchemeWork(costs, profile, chosen, assignment), *without)
    return run(stage_actors(costs.outline, chosen, assignment.counts, costs.ranks), costs.cluster, work)


def moved(costs: Costs, profile: Profile, chosen: hg.Strategy, op: Op) -> list[Transfers]:
    """Return what pulls or pushes of an iteration with work for every pipeline move."""
    counts = [len(p.stages) for p in chosen.pipelines]
    work = costs.work(chosen, Assignment.even(counts, [1024] * len(counts)))
    return [work.moved(op, bucket.name) for bucket in costs.buckets]
