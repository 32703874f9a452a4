"""The check passes what is right and refuses what is wrong, whatever way it came to be wrong."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

import hydragraph as hg
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check import check_once
from hydragraph.frontend.check.loss_comparison import Difference
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.numeric_check import Attempt, check
from hydragraph.ir.program import Program
from tests.models import MODELS, bert, captured, llama, randomised, tiny
from tests.module_cases import Reversed
from tests.own_models import Own, classified, small, weighted
from tests.thorough import first, only, thorough

pytestmark = pytest.mark.usefixtures("shared_graphs")

aten = torch.ops.aten


@thorough
@pytest.mark.parametrize("name", first(["mixtral"], ["llama", "gpt2", "mixtral"]))
def test_families_pass(name: str) -> None:
    program, model = captured(name)
    found = check(CheckedModel(model, program))
    assert not found.problem
    assert found.worst < 1e-4
    assert len(set(found.tokens)) == 2


def test_graphs_that_do_not_run_as_they_would_be_trained_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Own):
        def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            return super().forward(input_ids, position_ids, cu_seqlens).double() @ self.out.weight

    # In double precision, in which all could be compared, this runs.
    monkeypatch.setattr("hydragraph.frontend.capture.refuse_mixed_dtypes", lambda *_: None)
    model = Wide(layers=0)
    model.stack = small().stack
    randomised(model)
    with pytest.raises(hg.Unsupported, match=r"the captured graph fails to run .*same dtype, but got: double != fl"):
        check(CheckedModel(model, capture(model)))


@thorough
@pytest.mark.parametrize("dtype", first([torch.bfloat16], [torch.bfloat16, torch.float64]))
def test_other_dtypes_pass(dtype: torch.dtype) -> None:
    model = llama(layers=2)
    found = check(CheckedModel(model, capture(model, dtype=dtype)))
    assert not found.problem
    assert found.worst < 1e-4


def of_sequences_and_tokens(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """Sum what whole sequences and weighted tokens lose."""
    return classified(outputs, batch) + weighted(outputs, batch)


def test_masked_own_models_and_losses_pass() -> None:
    options: dict[str, Any] = {"loss": of_sequences_and_tokens, "example": {"weight": torch.zeros(1, 4)}}
    model = randomised(Own(layers=1, outputs=7, causal=False))
    assert not check(CheckedModel(model, capture(model, **options), **options)).problem


@thorough
def test_masked_models_of_the_library_pass() -> None:
    model = bert()
    assert not check(CheckedModel(model, capture(model))).problem


@pytest.mark.parametrize("detached", first([True], [False, True]))
def test_a_loss_that_large_logits_of_padding_would_change_is_refused(detached: bool) -> None:
    def loss(x: Tensor, batch: dict[str, Tensor], masked: bool) -> Tensor:
        large = F.relu(x[0].abs() - 50).sum(-1)
        large = large.detach() if detached else large
        counts = batch["labels"][0] != -100
        each = F.cross_entropy(x[0], batch["labels"][0], ignore_index=-100, reduction="none")
        return (each + (large * counts if masked else large)).sum()

    model = randomised(small())
    for masked in (True, False):
        own = functools.partial(loss, masked=masked)
        subject = CheckedModel(model, capture(model, loss=own), own)
        with nullcontext() if masked else pytest.raises(hg.Unsupported, match="padding tokens change the loss"):
            check(subject)


@functools.cache
def three_layers() -> tuple[Program, nn.Module]:
    model = randomised(small(layers=3))
    return capture(model), model


def test_a_meta_model_is_checked_with_drawn_weights_one_group_of_blocks_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hydragraph.frontend.check.numeric_check.TOGETHER", 1)
    program, _ = three_layers()
    with torch.device("meta"):
        model = small(layers=3)
    found = check(CheckedModel(model, program), "full")
    assert (found.blocks, found.layers, found.problem) == (3, 3, "")
    assert all(p.is_meta for p in model.parameters())


def test_every_block_is_checked_under_full_and_each_kind_under_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    program, model = three_layers()
    subject = CheckedModel(model, program)
    before = {n: p.clone() for n, p in model.named_parameters()}
    assert check(subject, "full").blocks == 3
    assert check(subject).blocks == 2  # the first and the last
    monkeypatch.setattr("hydragraph.frontend.check.numeric_check.TOGETHER", 1)
    assert check(subject).blocks == 1
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())


def test_a_weight_that_distant_blocks_share_is_compared_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(small(layers=4))
    model.stack[2].up, model.stack[3].down.weight = model.stack[1].up, model.stack[1].down.weight
    monkeypatch.setattr("hydragraph.frontend.check.numeric_check.TOGETHER", 1)
    assert not check(CheckedModel(model, capture(model)), "full").problem


def test_a_block_that_occurs_twice_is_compared_with_its_buffers() -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("scale", torch.rand(32) + 0.5)

        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            return self.inner(x, cu_seqlens) * self.scale

    model: Any = randomised(small(layers=2))
    first, second = map(Scaled, model.stack)
    model.stack = nn.ModuleList([first, second, first])
    assert not check(CheckedModel(model, capture(model)), "full").problem


@thorough
@pytest.mark.parametrize("batched", [False, True])
def test_a_batch_norm_with_fixed_statistics_computes_what_it_does_alone(batched: bool) -> None:
    class Normed(nn.Sequential):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
            layer, norm = self
            x = layer(x, cu_seqlens)
            return norm(x.mT[None])[0].mT if batched else norm(x)

    model = Own()
    for i, layer in enumerate(model.stack):
        norm = nn.BatchNorm1d(32, affine=not batched)
        norm.running_mean, norm.running_var = torch.randn(32), torch.rand(32) + 0.5
        model.stack[i] = Normed(layer, norm)
    model.eval()
    assert not check(CheckedModel(model, capture(model))).problem


def edited(program: Program, block: str, change: Callable[[fx.GraphModule], None]) -> Program:
    """Return a program with one template's graph changed in all blocks that share it."""
    name = next(b.template for b in program.blocks if b.name == block)
    graph = copy.deepcopy(program.templates[name].graph)
    change(graph)
    graph.recompile()
    template = replace(program.templates[name], graph=graph)
    return replace(program, templates={**program.templates, name: template})


def changing(target: Any, how: Any, by: float) -> Callable[[fx.GraphModule], None]:
    """Change a graph: do something to the result of the first operator of a kind."""

    def change(graph: fx.GraphModule) -> None:
        node = next(n for n in graph.graph.nodes if n.target is target)
        with graph.graph.inserting_after(node):
            scaled = graph.graph.call_function(how, (node, by))
        scaled.meta = dict(node.meta)
        node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    return change


@pytest.mark.parametrize(
    ("block", "target", "how", "by", "where"),
    [
        ("layer.0", aten.silu.default, aten.mul.Tensor, 1.01, "layer.0"),
        ("embed", aten.embedding.default, aten.add.Tensor, 0.01, "before its first block or after its last"),
        ("head", aten.linear.default, aten.mul.Tensor, 1.01, "before its first block or after its last"),
    ],
)
def test_a_changed_graph_is_refused(block: str, target: Any, how: Any, by: float, where: str) -> None:
    program, model = captured("llama")
    wrong = edited(program, block, changing(target, how, by))
    with pytest.raises(hg.Unsupported, match=where) as error:
        check(CheckedModel(model, wrong))
    assert "weight" in str(error.value)


class Changed(Own):
    """A model with something in it that a trace may lose."""

    def __init__(self, what: str) -> None:
        super().__init__(layers=0)
        self.stack, self.what = small(layers=3).stack, what

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = (self.tokens(input_ids) + self.places(position_ids))[0]
        if self.what == "mixing":
            x = x * (1 + x.sort(0).values)
        if self.what == "reversed":
            x = Reversed.apply(x)
        for block in self.stack:
            x = block(x, cu_seqlens)
        return self.out(self.norm(x))[None]


@only("reversed")
@pytest.mark.parametrize("what", ["mixing", "reversed"])
def test_what_a_trace_loses_is_refused(what: str) -> None:
    model = randomised(Changed(what))
    with pytest.raises(hg.Unsupported):
        hg.capture(model, check="full")


def test_a_mean_loss_is_refused() -> None:
    def mean(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    with pytest.raises(hg.Unsupported):
        hg.capture(randomised(small()), loss=mean, check="full")


@thorough
def test_hooks_are_refused_and_replaced_forwards_are_kept() -> None:
    model = llama(layers=2)
    _forward(model)
    hg.capture(model, check="full")
    for change in (_hook, _gradient_hook):
        model = llama(layers=2)
        change(model)
        with pytest.raises(hg.Unsupported):
            hg.capture(model, check="full")


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _given, output: output * 2)


def _gradient_hook(model: Any) -> None:
    model.model.norm.weight.register_hook(lambda gradient: gradient * 2)


def _forward(model: Any) -> None:
    layer = model.model.layers[0]
    usual = layer.forward
    layer.forward = lambda *given, **options: usual(*given, **options) * 1.1


@thorough
def test_a_window_that_only_the_mask_makes_is_captured() -> None:
    settings = tiny(
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, use_sliding_window=True, sliding_window=8, max_window_layers=0,
        layer_types=["sliding_attention"] * 2, attn_implementation="eager",
    )  # fmt: skip
    model = randomised(Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)))
    hg.capture(model, check="full")


def test_zeros_hide_nothing() -> None:
    """Operators that follow a matrix initialised to zero are compared as well."""
    program, trained = captured("llama")
    model = copy.deepcopy(trained)  # other tests have it, too
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(hg.Unsupported, match=r"layer\.0"):
        check(CheckedModel(model, edited(program, "layer.0", changing(aten.silu.default, aten.mul.Tensor, 1.01))))


def test_a_model_that_cannot_run_alone_is_refused_as_not_checked() -> None:
    program, _ = captured("llama")
    model = MODELS["llama"]()

    def never(*_given: Any, **_options: Any) -> Any:
        raise RuntimeError("only on Tuesdays")

    model.forward = never
    with pytest.raises(hg.Unsupported, match=r"not checked: .*only on Tuesdays.*check='off'"):
        check_once.check_here(CheckedModel(model, program), "full")
    assert check_once.check_here(CheckedModel(model, program), "off") == ""


def test_a_difference_in_double_precision_with_the_users_weights_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Difference("w", 1.0, 1.0, 1e7, 1.0, 2.0, (8, 9))
    tried: list[Attempt] = []

    def compared(*arguments: Any) -> Difference:
        tried.append(arguments[-1])
        return replace(wrong, ratio=wrong.ratio if arguments[-1].copied else 0.0)

    program, model = captured("llama")
    monkeypatch.setattr("hydragraph.frontend.check.numeric_check._Comparer._attempt", compared)
    with pytest.raises(hg.Unsupported, match="the gradient of w differs by"):
        check(CheckedModel(model, program))
    assert all(attempt.copied for attempt in tried)
