"""Compiled variants against the graphs they were made of: numbers, sizes, collectives, and what stays PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.check.emulated_stage import EmulatedCollectives, run_ranks
from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Block, Program
from hydragraph.passes import compile_with_inductor
from hydragraph.passes.compile_with_inductor import UNORDERED, GraphPiece, choose_backend, refuse_halves
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants, local_parameters, vocabulary_starts
from hydragraph.private.inductor import Code, Condition, missing_compiler
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy
from tests import reference
from tests.models import gpt2, llama, randomised, sequences
from tests.own_models import Headed
from tests.thorough import first, thorough

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing_compiler(CPU) is not None, reason="Inductor finds no C++ compiler here")


MODELS = {
    "llama": functools.partial(llama, layers=2, vocab=102),
    "gpt2": functools.partial(gpt2, layers=1, vocab=102),
    "small": lambda: randomised(Headed()),
}
TOKENS = (4, 12, 50)  # divide by 2, as sequence parallelism needs
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # eager rounds to bfloat16 between operators, compiled does not


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> tuple[Program, nn.Module]:
    model = MODELS[name]()
    return hg.capture(model, dtype=dtype), model


def inputs(program: Program, model: nn.Module, block: Block, tokens: int) -> dict[str, Tensor]:
    """Make a value for every input of a block's template but its weights, and for its output's gradient."""
    generator = torch.Generator().manual_seed(tokens)
    template, buffers = program.templates[block.template], dict(model.named_buffers())
    found = {local: buffers[n] for local, n in zip(template.buffers, block.buffers, strict=True)}
    nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"][-len(template.inputs) :]
    for node, name in zip(nodes, template.inputs, strict=True):
        value = value_of(node)
        sizes = [tokens if isinstance(s, torch.SymInt) else s for s in value.shape]
        if value.dtype == torch.int32:
            found[name] = torch.tensor([0, 1, 3, tokens], dtype=torch.int32)[-tokens:]
        elif value.is_floating_point():
            found[name] = torch.randn(sizes, generator=generator).to(value.dtype)
        else:
            found[name] = torch.randint(0, 100, sizes, generator=generator)
    if "labels" in found:
        found["labels"][0, 1] = -100
    output = next(n for n in template.graph.graph.nodes if n.op == "output").args[0][0].meta["val"]
    shape = [tokens if isinstance(s, torch.SymInt) else s for s in output.shape]
    return found | {"tangent": torch.randn(shape, generator=generator).to(output.dtype)}


def run(
    program: Program, model: nn.Module, block: Block, part: StagePart, variant: Variant, tokens: int
) -> list[list[Tensor]]:
    """Return what every rank of a stage computes: the output, then the gradients."""
    parameters = local_parameters(program, block, program.templates[block.template])
    weights, given = dict(model.named_parameters()), inputs(program, model, block, tokens)

    def shard(name: str, index: int) -> Tensor:
        parameter = parameters[name]
        flat = parameter.canonical(weights[parameter.name].detach())
        held = torch.cat([flat[a:b] for a, b in parameter.intervals(part.tp, index)])
        return parameter.natural(held, part.tp, index).to(program.dtype)

    def rank(collectives: EmulatedCollectives) -> list[Tensor]:
        here = StagePart(StageKind(part.tp, part.sequence_parallel), collectives.index)
        values: dict[str, object] = {n: shard(n, collectives.index) for n in parameters} | given  # pyrefly: ignore[bad-assignment]
        if part.sequence_parallel:
            own = [n for n in ("hidden", "tangent") if n in given and given[n].dim() == 3]
            values |= {n: given[n].chunk(part.tp, 1)[collectives.index] for n in own}
        values |= vocabulary_starts(variant, parameters, here) | {"collectives": collectives}
        with torch.no_grad():
            out, *saved = variant.forward(*(values[n] for n in variant.inputs))
            values |= {f"saved.{i}": s for i, s in enumerate(saved)}
            return [out, *variant.backward(*(values[n] for n in variant.needs))]

    return run_ranks(part.tp, rank)


def pieces(variant: Variant) -> list[GraphPiece]:
    return [m for g in (variant.forward, variant.backward) for m in g.children() if isinstance(m, GraphPiece)]


CASES = {
    "llama, two ranks with their tokens": ("llama", StagePart(StageKind(2, True), 0), torch.float32, (1,)),
    "llama, two ranks: embed and head": ("llama", StagePart(StageKind(2, True), 0), torch.float32, (0, 3)),
    "gpt2, two ranks": ("gpt2", StagePart(StageKind(2), 0), torch.float32, (1,)),
    "llama, sums in pieces": ("llama", StagePart(StageKind(2, False, True, True), 0), torch.float32, (1,)),
    "llama in bfloat16, recomputed": ("llama", StagePart(StageKind(recompute=True)), torch.bfloat16, (1,)),
}
KEPT = ()  # test_ranks_that_compile_equal_one_device compiles them too


@functools.cache
def variants(case: str, backend: str) -> Variants:
    name, _, dtype, _ = CASES[case]
    return Variants(captured(name, dtype)[0], backend=backend)


@needs_compiler
@pytest.mark.parametrize("case", first(KEPT, CASES))
def test_compiled_graphs_compute_the_same_for_any_number_of_tokens(case: str) -> None:
    name, part, dtype, blocks = CASES[case]
    program, model = captured(name, dtype)
    for block in (program.blocks[i] for i in blocks):
        wanted, found = (variants(case, b).get(block, part) for b in ("eager", "inductor"))
        assert pieces(found)
        for tokens in TOKENS:
            results = (run(program, model, block, part, v, tokens) for v in (wanted, found))
            for one, other in zip(*results, strict=True):
                scale = float(torch.stack([w.float().norm() for w in one]).norm())
                for what, w, f in zip(("output", *wanted.gradients), one, other, strict=True):
                    assert (f.dtype, f.shape) == (w.dtype, w.shape)
                    error, tolerance = float((f.float() - w.float()).norm()), TOLERANCE[dtype]
                    assert error <= tolerance * float(w.float().norm()) + tolerance / 100 * scale, (block.name, what)


@needs_compiler
@pytest.mark.parametrize("case", first(KEPT, CASES))
def test_nothing_is_compiled_again_for_another_number_of_tokens(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, part, dtype, _ = CASES[case]
    program, model = captured(name, dtype)
    block = program.blocks[1]
    found = variants(case, "inductor").get(block, part)
    for piece in pieces(found):
        monkeypatch.setattr(piece.graph, "forward", None)  # would run where no code holds
    before = dict(counters["inductor"])
    for tokens in (6, 8, 30, 300):
        run(program, model, block, part, found, tokens)
    assert all(len(piece.codes) == 1 for piece in pieces(found))
    assert dict(counters["inductor"]) == before


def calls(graph: fx.GraphModule) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_method"]


def operators(graph: fx.GraphModule) -> list[object]:
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


@thorough
@needs_compiler
@pytest.mark.parametrize("block", first([1], [0, 1, 3]))
def test_collectives_stay_in_their_order_and_unordered_sums_stay_pytorchs(block: int) -> None:
    case = "llama, two ranks with their tokens"
    name, part, _, _ = CASES[case]
    program, _ = captured(name)
    eager, found = (variants(case, b).get(program.blocks[block], part) for b in ("eager", "inductor"))
    for before, after in ((eager.forward, found.forward), (eager.backward, found.backward)):
        assert calls(after) == calls(before) != []
        assert [o for o in operators(after) if o in UNORDERED] == [o for o in operators(before) if o in UNORDERED]


def given_a_layer() -> tuple[Variant, dict[str, Tensor], set[str]]:
    """Return a compiled layer, values of all its inputs, and its weights' names."""
    name, part, dtype, _ = CASES["llama in bfloat16, recomputed"]
    program, model = captured(name, dtype)
    block = program.blocks[1]
    variant = variants("llama in bfloat16, recomputed", "inductor").get(block, part)
    parameters = local_parameters(program, block, program.templates[block.template])
    weights = {n: dict(model.named_parameters())[p.name].detach().to(dtype) for n, p in parameters.items()}
    values = {n: p.natural(p.canonical(weights[n]).clone()) for n, p in parameters.items()}
    return variant, values | inputs(program, model, block, 12), set(parameters)


@thorough
@needs_compiler
@torch.no_grad()
def test_weights_come_as_views_of_a_flat_buffer_and_no_input_or_saved_value_is_written_to() -> None:
    variant, values, weights = given_a_layer()
    assert not all(values[n].is_contiguous() for n in weights)
    before = {n: v.clone() for n, v in values.items()}
    _, *saved = variant.forward(*(values[n] for n in variant.inputs))
    kept = [s.clone() for s in saved if isinstance(s, Tensor)]
    held = values | {f"saved.{i}": s for i, s in enumerate(saved)}
    variant.backward(*(held[n] for n in variant.needs))
    assert all(torch.equal(values[n], v) for n, v in before.items())
    assert all(torch.equal(a, b) for a, b in zip((s for s in saved if isinstance(s, Tensor)), kept, strict=True))


def test_an_input_that_is_not_contiguous_is_made_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = make_fx(lambda x: (torch.relu(2 * x) + x.exp(),), tracing_mode="symbolic")(torch.randn(12, 8))
    given = [value_of(node) for node in graph.graph.nodes if node.op == "placeholder"]
    assert given[0].is_contiguous()
    taken: list[Tensor] = []

    def compile_graph(piece: fx.GraphModule, inputs: list[Tensor], *_: object) -> tuple[Code, Condition]:
        assert [value.stride()[-1] for value in inputs] == [1], "code is for these strides"

        def code(arguments: list[Any]) -> Sequence[Any]:
            taken.append(arguments[-1])
            return piece(arguments[-1])

        return code, lambda sizes: True

    monkeypatch.setattr(compile_with_inductor, "compile_graph", compile_graph)
    compiled, _ = compile_with_inductor._compile(graph, given, {}, ["hidden"])
    x = torch.randn(12, 16)[:, ::2]
    assert not x.is_contiguous()
    assert torch.allclose(compiled(x)[0], graph(x)[0])
    assert [value.is_contiguous() for value in taken] == [True]


@thorough
@needs_compiler
@torch.no_grad()
def test_a_layers_input_that_is_not_contiguous_is_made_so() -> None:
    variant, values, _ = given_a_layer()
    wanted = variant.forward(*(values[n] for n in variant.inputs))[0]
    wide = torch.cat([values["hidden"], values["hidden"]], dim=2)
    values["hidden"] = wide[:, :, : wide.shape[2] // 2]
    assert not values["hidden"].is_contiguous()
    assert torch.equal(variant.forward(*(values[n] for n in variant.inputs))[0], wanted)


def test_backends_are_chosen_by_device_and_others_refused() -> None:
    assert choose_backend(None, CPU) == choose_backend("eager", CPU) == "eager"
    with pytest.raises(ValueError, match=r"'fast': use 'inductor' or 'eager', or None"):
        choose_backend("fast", CPU)


def test_a_missing_compiler_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_with_inductor, "missing_compiler", lambda device: f"nothing compiles for {device}")
    with pytest.raises(Unsupported, match=r'backend="inductor": nothing compiles for cuda; .* backend="eager"'):
        choose_backend(None, torch.device("cuda"))
    assert choose_backend("eager", torch.device("cuda")) == "eager"


@needs_compiler
def test_what_inductor_cannot_compile_is_refused_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such instruction\nand much more")

    monkeypatch.setattr(compile_with_inductor, "compile_graph", fail)
    program, _ = captured("gpt2")
    with pytest.raises(Unsupported, match=r"RuntimeError: no such instruction\).*backend=\"eager\"") as raised:
        Variants(program, backend="inductor").get(program.blocks[0], StagePart())
    assert raised.value.where == program.blocks[0].name


LENGTHS = [20, 7, 33, 1, 12]


def train(name: str, strategy: str, backend: str = "inductor") -> tuple[list[float], dict[str, Tensor]]:
    """Train on a rank; return its losses and, on rank 0, the first mini-batch's gradients."""
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    exe = hg.compile(MODELS[name](), strategy, sgd, backend=backend, device="cpu")
    data = [sequences(LENGTHS, seed=i) for i in range(4)]
    gradients = exe.gradients(data[0])
    losses = [exe.step(batch).loss for batch in data]
    exe.close()
    return losses, gradients


@needs_compiler
@pytest.mark.parametrize("name", first(["small"], ["small", "gpt2"]))
def test_ranks_that_compile_equal_one_device(name: str) -> None:
    runs = hg.launch(train, 2, name, "<[1,0]x1s>")  # a head in two parts, fused with its loss
    losses, gradients = train(name, "<tp1,pp1>", "eager")
    assert all(found == pytest.approx(losses, rel=1e-5) for found, _ in runs)
    worst, ratio = reference.worst(runs[0][1], gradients)
    assert ratio <= 1, f"gradient of {worst} is {ratio:.2f} times the tolerance off"


def test_compiled_backwards_are_not_split() -> None:
    refuse_halves(Strategy.parse("<tp1,pp2>", 2))
    with pytest.raises(Unsupported, match=r'under schedule zb-h1, which splits each backward.*pass backend="eager"'):
        refuse_halves(Strategy.parse("<tp1,pp2> zb-h1", 2))
