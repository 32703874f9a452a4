"""Expected memory of the blocks of a small Llama, compared with the storages that really exist."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import TracedSizes, footprint, halves_footprint, most_alive
from hydragraph.ir.program import Program
from hydragraph.kernels.linear_cross_entropy import working_bytes
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.thorough import only

TOKENS = MicroBatch(tokens=48, sequences=3)
ALONE = StagePart()


def llama() -> Program:
    return captured("llama")[0]


def storages(tensors: list[object]) -> dict[int, int]:
    found = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def inputs(block: int) -> dict[str, object]:
    """Return real inputs of one of the model's blocks, by name."""
    program = llama()
    chosen, tokens = program.blocks[block], TOKENS.tokens
    template, aux = program.templates[chosen.template], program.templates[program.aux.template]
    fields = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.int64),
        "position_ids": torch.arange(tokens)[None],
        "labels": torch.zeros(1, tokens, dtype=torch.int64),
        "cu_seqlens": torch.tensor([0, 16, 32, tokens], dtype=torch.int32),
        "max_length": torch.tensor(16),
    }
    tables = aux.graph(*(torch.ones(8) for _ in aux.buffers), *(fields[name] for name in aux.inputs))
    own = {
        n: torch.randn(program.parameters[c].shape) for n, c in zip(template.parameters, chosen.parameters, strict=True)
    }
    others = [name for name in template.inputs if name.startswith("other.")]
    shared = {name: tables[index] for name, index in zip(others, chosen.aux, strict=True)}
    return {**fields, **own, **shared, "hidden": torch.randn(1, tokens, 64)}


@only("0-False", "0-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("block", [0, 1, -1])
def test_what_a_block_saves_is_what_its_graph_really_keeps(block: int, recompute: bool) -> None:
    variant = Variants(llama()).get(llama().blocks[block], StagePart(StageKind(recompute=recompute)))
    given = inputs(block)
    output, *saved = variant.forward(*(given[name] for name in variant.inputs))
    own = storages(saved).keys() - storages([output, *given.values()]).keys()
    found = footprint(variant, ALONE, TOKENS)
    assert found.saved == sum(storages(saved)[key] for key in own)
    assert found.output == output.untyped_storage().nbytes()
    assert ("hidden" in found.keeps) == bool(storages([given["hidden"]]).keys() & storages(saved).keys())
    assert found.forward >= found.saved + found.output


@only("1")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_fused_head_takes_a_chunk_of_logits_beside_its_results(tp: int) -> None:
    head, many = llama().blocks[-1], MicroBatch(tokens=4096, sequences=3)
    part = StagePart(StageKind(tp))
    fused, whole = (footprint(Variants(llama(), fused_head=f).get(head, part), part, many) for f in (True, False))
    rows = -(-101 // tp)
    beside = working_bytes(4096, 64, rows, torch.float32)
    assert fused.output == whole.output
    assert fused.forward >= beside + 4096 * 64 * 4 + rows * 64 * 4  # and the two gradients


def test_a_graph_takes_at_most_what_lives_at_once() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(torch.neg, (x,))]
    nodes += [graph.call_function(torch.neg, (nodes[-1],)) for _ in range(3)]
    graph.output((nodes[-1],))
    value = torch.empty(100)
    x.meta["val"] = value
    for node in nodes:
        node.meta["val"] = torch.empty(100)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert most_alive(module, TracedSizes("", 1.0, 2)) == 2 * 400  # an operand and its result


def walked(graph: fx.GraphModule, sizes: TracedSizes) -> int:
    """Return what lives at most, node by node."""
    nodes = list(graph.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    made = [sizes.storages(node) for node in nodes]
    given = {
        key for node, own in zip(nodes, made, strict=True) if node.op in ("placeholder", "get_attr") for key in own
    }
    until: dict[int, int] = {}
    for node, own in zip(nodes, made, strict=True):
        for key in own:
            until[key] = max([until.get(key, 0), order[node], *(order[user] for user in node.users)])
    alive: dict[int, int] = {}
    most = 0
    for i, (node, own) in enumerate(zip(nodes, made, strict=True)):
        alive = {**{key: size for key, size in own.items() if key not in given}, **alive}
        most = max(most, sum(alive.values()) + sizes.within(node))
        alive = {key: size for key, size in alive.items() if until[key] > i}
    return most


@only("kind1-False")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [StageKind(1, recompute=True), StageKind(2, sequence_parallel=True)])
def test_what_lives_at_most_is_what_a_walk_finds(kind: StageKind, fused: bool) -> None:
    program = llama()
    variants = Variants(program, fused_head=fused, added=True)
    part = StagePart(kind, 0)
    for block in {each.template: each for each in program.blocks}.values():
        variant = variants.get(block, part)
        for batch in (MicroBatch(2 * kind.tp, 1), MicroBatch(4096 * kind.tp, 3)):
            sizes = TracedSizes.of(variant, part, batch)
            for graph in (variant.forward, variant.backward):
                assert most_alive(graph, sizes) == walked(graph, sizes)


def test_the_estimate_of_halves_is_high() -> None:
    program, _ = captured("llama")
    part = StagePart(StageKind())
    variant = Variants(program).get(program.blocks[1], part)
    halves = halves_footprint(variant, part, MicroBatch(100, 2))
    most = footprint(variant, part, MicroBatch(100, 2)).halves_estimate
    assert 0 < halves.first <= most.first
    assert 0 < halves.second <= most.second
    assert 0 < halves.postponed <= most.postponed
    assert halves.keeps <= most.keeps
