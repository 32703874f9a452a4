"""Sharded forward and backward graphs against the whole template, ranks as threads."""

from __future__ import annotations

import functools
from itertools import product

import pytest
import torch
import transformers
from torch import Tensor, nn

from hydragraph.cluster.collectives import Collectives
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check.emulated_stage import generate_code, run_ranks
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program import Block, Program
from hydragraph.passes.collective_operators import METHODS, SENT, STARTS, SUMMED
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.shard import shard
from hydragraph.passes.variants import Variants, local_parameters, vocabulary_starts
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.frontend.families import shrink
from tests.models import gpt2, llama
from tests.thorough import first, only

MODELS = {
    "llama": functools.partial(llama, layers=1, heads=12, kv=12),
    "grouped": functools.partial(llama, layers=1, heads=12, kv=6),
    "shared kv heads": functools.partial(llama, layers=1, heads=12, kv=2, tied=True),
    "one kv head": functools.partial(llama, layers=1, heads=4, kv=1),
    "gpt2": functools.partial(gpt2, layers=1, heads=12),
}
T = 12  # divides by every degree below, as sequence parallelism needs


@functools.cache
def captured(name: str) -> tuple[Program, nn.Module]:
    model = MODELS[name]()
    return capture(model), model


def values(program: Program, model: nn.Module, block: Block) -> dict[str, Tensor]:
    """Make a value for every input of a block's template."""
    generator = torch.Generator().manual_seed(1)
    template = program.templates[block.template]
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found = {local: parameters[n].detach() for local, n in zip(template.parameters, block.parameters, strict=True)}
    found |= {local: buffers[n] for local, n in zip(template.buffers, block.buffers, strict=True)}
    nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"][-len(template.inputs) :]
    for node, name in zip(nodes, template.inputs, strict=True):
        value = value_of(node)
        sizes = [T if isinstance(s, torch.SymInt) else s for s in value.shape]
        if value.dtype == torch.int32:
            found[name] = torch.tensor([0, 5, 6, T], dtype=torch.int32)
        elif value.is_floating_point():
            found[name] = torch.randn(sizes, generator=generator)
        else:
            found[name] = torch.randint(0, 100, sizes, generator=generator)
    if "labels" in found:
        found["labels"][0, 3] = -100
    return found


def run(variant: Variant, given: dict[str, object], tangent: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.no_grad():
        out, *saved = variant.forward(*(given[n] for n in variant.inputs))
        tangent = torch.ones_like(out) if tangent is None else tangent
        held = {f"saved.{i}": s for i, s in enumerate(saved)} | {"tangent": tangent} | given
        return out, dict(zip(variant.gradients, variant.backward(*(held[n] for n in variant.needs)), strict=True))


@functools.cache
def variants(program: Program, partitioner: str = "min_cut", fused_head: bool = False) -> Variants:
    return Variants(program, partitioner, fused_head=fused_head)


def close(a: Tensor, b: Tensor, scale: float) -> bool:
    return bool((a - b).norm() <= 1e-5 * b.norm() + 1e-7 * scale)


@only("gpt2-3-True")
@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"),
    first(
        [
            ("llama", 3, True),
            ("grouped", 3, False),
            ("shared kv heads", 3, True),
            ("one kv head", 2, False),
            ("gpt2", 3, False),
            ("gpt2", 3, True),
        ],
        product(MODELS, [1, 2, 3, 4, 6], [False, True]),
    ),
)
def test_sharded_graphs_equal_the_whole_template(name: str, tp: int, sequence_parallel: bool) -> None:
    if sequence_parallel and tp in (1, 4, 6):
        pytest.skip("one rank does not split, and degrees 2 and 3 already cover larger ones")
    program, model = captured(name)
    kv = MODELS[name].keywords.get("kv", 12)
    if program.heads[0] % tp or (kv % tp and tp % kv):
        with pytest.raises(Unsupported, match=f"degree {tp}"):
            check(program, model, program.blocks[1], tp, sequence_parallel)
        return
    for block in program.blocks:
        check(program, model, block, tp, sequence_parallel)


@only("gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sums_in_pieces_equal_the_whole_template(name: str) -> None:
    program, model = captured(name)
    for block in program.blocks[1:]:
        check(program, model, block, 3, sequence_parallel=False, in_pieces=True)


def check(
    program: Program,
    model: nn.Module,
    block: Block,
    tp: int,
    sequence_parallel: bool,
    fused_head: bool = False,
    in_pieces: bool = False,
) -> None:
    template = program.templates[block.template]
    whole = values(program, model, block)
    oracle = variants(program, "default").get(block, StagePart())
    tangent = torch.randn(oracle.forward(*(whole[n] for n in oracle.inputs))[0].shape)
    want, want_gradients = run(oracle, whole, tangent)  # pyrefly: ignore[bad-argument-type]
    described = {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}

    ranks = variants(program, fused_head=fused_head)
    form = StageKind(tp, sequence_parallel, sums_in_pieces=in_pieces)
    compiled = [ranks.get(block, part) for part in form.parts()]
    generate_code(compiled)

    def rank(collectives: object) -> tuple[Tensor, dict[str, Tensor]]:
        index = collectives.index
        given: dict[str, object] = dict(whole)
        for local, parameter in described.items():
            flat = parameter.canonical(whole[local])
            held = torch.cat([flat[a:b] for a, b in parameter.intervals(tp, index)])
            given[local] = parameter.natural(held, tp, index)
        given |= vocabulary_starts(compiled[index], described, StagePart(StageKind(tp), index)) | {
            "collectives": collectives
        }
        if not sequence_parallel:
            return run(compiled[index], given, tangent)

        def own(x: Tensor) -> Tensor:
            return x.chunk(tp, 1)[index] if x.dim() == 3 else x

        out, found = run(compiled[index], given | {"hidden": own(whole.get("hidden", tangent))}, own(tangent))
        found |= {"hidden": collectives.all_gather(found["hidden"], 1)} if "hidden" in found else {}
        return collectives.all_gather(out, 1) if out.dim() == 3 else out, found

    results = run_ranks(tp, rank)
    scale = float(torch.stack([g.norm() for g in want_gradients.values()]).norm())
    for out, _ in results:
        assert close(out, want, 1.0)
    for name, gradient in want_gradients.items():
        if name == "hidden":
            assert all(close(r[1]["hidden"], gradient, scale) for r in results)
            continue
        parameter, kind = described[name], compiled[0].kinds[name]
        total = torch.zeros(parameter.size)
        for index, (_, found) in enumerate(results):
            flat, at = parameter.canonical(found[name]), 0
            if kind is GradientKind.REPLICA:
                assert close(flat, parameter.canonical(gradient), scale)
                if index:
                    continue
            for a, b in parameter.intervals(tp, index):
                total[a:b] += flat[at : at + b - a]
                at += b - a
        assert close(total, parameter.canonical(gradient), scale), (block.name, name, kind)


def test_heads_that_do_not_divide_are_refused_by_name() -> None:
    program, _ = captured("gpt2")
    with pytest.raises(Unsupported, match=r"attn\.c_attn\.(weight|bias).*tensor-parallel degree 5"):
        variants(program).get(program.blocks[1], StagePart(StageKind(5), 0))


@functools.cache
def linear_attention() -> Program:
    """Capture one layer whose two key heads and four value heads attend linearly."""
    config, _ = shrink(transformers.Qwen3NextConfig)
    config.update({"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mlp_only_layers": [0]})
    return capture(transformers.Qwen3NextForCausalLM(config))


@pytest.mark.parametrize(("tp", "message"), [(4, "4 ranks would share keys of a convolution"), (3, "2 heads|2 key")])
def test_ranks_share_no_value_heads_of_linear_attention(tp: int, message: str) -> None:
    program = linear_attention()
    block = program.blocks[1]
    template = program.templates[block.template]
    parameters = local_parameters(program, block, template)
    assert shard(template, parameters, StagePart(StageKind(2), 1)).graph is not None
    with pytest.raises(Unsupported, match=message):
        shard(template, parameters, StagePart(StageKind(tp), 0))


def test_every_collective_states_its_traffic_and_is_a_method() -> None:
    called = {*METHODS.values(), SUMMED}
    assert SENT.keys() == called
    started = {STARTS.get(name, name) for name in called}
    assert all(hasattr(Collectives, name) for name in started)
