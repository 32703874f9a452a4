"""What ranks run against whole blocks: right graphs pass, and every kind of wrong one is refused by name."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import hydragraph as hg
from hydragraph.cluster.launch import launch
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check import narrow_model
from hydragraph.frontend.check import stage_check as stages
from hydragraph.frontend.check.loss_comparison import compare
from hydragraph.frontend.check.narrow_model import CheckedModel, LibraryModel
from hydragraph.frontend.check.stage_check import StageCheck
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program import Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind
from tests.models import captured, gpt2, llama, sequences
from tests.thorough import only, thorough

pytestmark = pytest.mark.usefixtures("shared_graphs")


def stage_check(model: Any, fused_head: bool = False, dtype: torch.dtype = torch.float32) -> StageCheck:
    return StageCheck(capture(model, dtype), initial_buffers(model), fused_head)


@functools.cache
def tied() -> tuple[Program, nn.Module]:
    model = llama(layers=2, tied=True, kv=1)
    return capture(model), model


def of_llama() -> StageCheck:
    """Return a check of the Llama that is captured once."""
    program, model = tied()
    return StageCheck(program, initial_buffers(model), False)


def parse(text: str) -> hg.Strategy:
    return hg.Strategy.parse(text, layers=2)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_it_compares_the_graphs_that_training_runs(backend: str) -> None:
    program, model = captured("llama")
    inductor = backend == "inductor"
    check = StageCheck(program, initial_buffers(model), inductor)
    trained = Variants(program, backend=backend, fused_head=inductor, added=True)
    for block in program.blocks:
        for part in StageKind(2).parts():
            assert check._cut.spec(block, part).key == trained.spec(block, part).key


@only("tied, one kv head")
@pytest.mark.parametrize(
    ("make", "options", "strategy"),
    [
        pytest.param(llama, {}, "<tp4,pp1>", marks=thorough),
        (of_llama, {}, "<[0,1]x2sr>"),
        pytest.param(llama, {"fused_head": True}, "<[0,1]x2s>", marks=thorough),
        (gpt2, {"fused_head": True, "dtype": torch.bfloat16}, "<[0,1]x1,[2]x1r>"),
    ],
    ids=["tp4", "tied, one kv head", "fused head", "fused head, bf16"],
)
def test_right_graphs_pass(make: Any, options: dict[str, Any], strategy: str) -> None:
    checked = of_llama() if make is of_llama else stage_check(make(layers=2), **options)
    checked.check(parse(strategy))


def dropped(graph: fx.GraphModule, method: str) -> fx.GraphModule | None:
    """Return a copy of a graph that leaves out its last call of a collective; None: it has none."""
    other = fx.GraphModule(graph, fx.Graph())
    other.graph.output(other.graph.graph_copy(graph.graph, {}))
    calls = [n for n in other.graph.nodes if n.op == "call_method" and n.target == f"start_{method}"]
    if not calls:
        return None
    (result,) = calls[-1].users
    result.replace_all_uses_with(calls[-1].args[1])
    other.graph.erase_node(result)
    other.graph.erase_node(calls[-1])
    other.recompile()
    return other


def without(method: str, side: str, rank: int | None = None) -> Callable[[Variant, int], Variant]:
    def change(variant: Variant, index: int) -> Variant:
        graph = dropped(getattr(variant, side), method) if rank in (None, index) else None
        return replace(variant, **{side: graph}) if graph is not None else variant  # pyrefly: ignore[bad-argument-type]

    return change


def swapped(variant: Variant, index: int) -> Variant:
    other = {GradientKind.REPLICA: GradientKind.PARTIAL, GradientKind.PARTIAL: GradientKind.PARTIAL}
    return replace(variant, kinds={name: other[kind] for name, kind in variant.kinds.items()})


@only("one rank")
@pytest.mark.parametrize(
    ("change", "strategy", "sentence"),
    [
        pytest.param(
            without("all_reduce", "forward"),
            "<tp2,pp1>",
            r"in stages of kind <tp2>: its output differs by .* times its norm",
            marks=thorough,
        ),
        (
            without("all_reduce", "backward"),
            "<tp2,pp1>",
            r"in stages of kind <tp2>: the gradient of .* differs by .* times",
        ),
        (
            without("all_reduce", "forward", rank=1),
            "<tp2,pp1>",
            r"graphs fail to run .*ranks of a stage make different calls",
        ),
        pytest.param(
            without("reduce_scatter", "backward"),
            "<[0,1]x2s>",
            r"in stages of kind <tp2s>: the graphs fail to run",
            marks=thorough,
        ),
        (swapped, "<tp2,pp1>", r"the gradient of .*norm.* differs by 1 times its norm"),
    ],
    ids=["forward", "backward", "one rank", "sequence parallelism", "summed replicas"],
)
def test_wrong_graphs_are_refused(
    change: Callable[[Variant, int], Variant], strategy: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = of_llama()
    right = Variants.get

    def get(self: Variants, block: Any, part: Any) -> Variant:
        variant = right(self, block, part)
        return variant if part.tp == 1 else change(variant, part.index)

    monkeypatch.setattr(Variants, "get", get)
    with pytest.raises(Unsupported, match=sentence):
        checked.check(parse(strategy))


@thorough
def test_what_passed_is_not_compared_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, "hydragraph.frontend.check"):
        stage_check(llama(layers=2)).check(parse("<tp2,pp1>"))
    assert [m for m in caplog.messages if m.startswith("checked the graphs of stages of kind <tp2>: worst error")]
    monkeypatch.delattr(StageCheck, "_compare")
    stage_check(llama(layers=2)).check(parse("<tp2,pp1>"))
    with pytest.raises(AttributeError):
        stage_check(llama(layers=2)).check(parse("<tp3,pp1>"))


def test_what_was_refused_is_refused_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = of_llama()
    monkeypatch.setattr(stages, "run_ranks", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    for _ in range(2):
        with pytest.raises(Unsupported, match="broken"):
            checked.check(parse("<tp2,pp1>"))


def test_what_is_too_large_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "LARGEST", 1000)
    with caplog.at_level(logging.WARNING, "hydragraph.frontend.check"):
        of_llama().check(parse("<tp2,pp1>"))
    assert caplog.messages == [
        "did not check the graphs of some blocks: embed (0.00646 M parameters, above 0.001 M); "
        "layer.0 (0.03 M parameters, above 0.001 M); head (0.00653 M parameters, above 0.001 M)"
    ]


@pytest.mark.parametrize(
    ("right", "strategy", "passed"),
    [
        (False, "<[0]x1,[1,2]x1,[3]x1>", 0),  # only one layer is cut
        pytest.param(True, "<tp2,pp1>", 3, marks=thorough),
    ],
    ids=["wrong", "right"],
)
def test_large_blocks_are_compared_in_a_narrow_copy(
    right: bool, strategy: str, passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "LARGE", 0)
    monkeypatch.setattr(stages, "LARGEST", 1000)
    monkeypatch.setattr(narrow_model, "FACTORS", (2,))
    model = llama(layers=3, width=104, vocab=104)
    program = capture(model)
    described = LibraryModel.of(CheckedModel(model, program))
    checked = pickle.loads(pickle.dumps(StageCheck(program, initial_buffers(model), False, model=described)))
    widths: list[int] = []

    def counted(computed: Any, expected: dict[str, torch.Tensor], *rest: Any) -> Any:
        widths.extend(value.shape[-1] for name, value in expected.items() if name == "input_layernorm.weight")
        return compare({n: v if right else v * 1.01 for n, v in computed.items()}, expected, *rest)

    monkeypatch.setattr(stages, "compare", counted)
    checked.check(hg.Strategy.parse(strategy, layers=3))
    assert set(widths) == {32}
    assert len(checked.passed) == passed


def test_what_is_never_finite_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageCheck, "_attempt", lambda *_: None)
    with caplog.at_level(logging.INFO, "hydragraph.frontend.check"):
        of_llama().check(parse("<tp2,pp1>"))
    (message,) = caplog.messages
    assert "embed (outputs or gradients are not finite with any weights" in message


def refused_then_trained() -> tuple[str, float]:
    """Return the error for a strategy whose graphs are wrong, and the loss of the next step without it."""
    right = StageCheck.check

    def check(self: StageCheck, strategy: hg.Strategy) -> None:
        if strategy.pipelines[0].stages[0].tp == 2:
            raise Unsupported("it is wrong", where="layer.0 in stages of kind <tp2>", remedy="none")
        right(self, strategy)

    StageCheck.check = check  # pyrefly: ignore[method-assign]
    sgd = lambda named: torch.optim.SGD(named, lr=0.1)  # noqa: E731
    exe = hg.compile(llama(layers=2), parse("<[0]x2r>+<[1]x2>"), sgd, device="cpu", check="full")
    with pytest.raises(Unsupported) as refused:
        exe.step(sequences([5, 9]), parse("<tp2,pp1>"))
    loss = exe.step(sequences([5, 9])).loss
    exe.close()
    return str(refused.value), loss


@thorough
def test_all_ranks_are_told_and_go_on() -> None:
    (first, loss), (second, other) = launch(refused_then_trained, 2)
    assert first == second
    assert "layer.0 in stages of kind <tp2>: it is wrong" in first
    assert loss == other
