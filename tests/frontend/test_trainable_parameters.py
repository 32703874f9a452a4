"""Which parameters get a gradient: what the analysis of a graph says is what autograd does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.functional_graph import export, functional_graph
from hydragraph.frontend.trainable_parameters import reached
from tests.adapted import LAYERS, MODELS
from tests.models import llama
from tests.own_models import Own, small
from tests.thorough import thorough

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda x, w: x * w,
    "detached": lambda x, w: x * w.detach(),
    "shape alone": lambda x, w: x + torch.zeros_like(w),
    "comparison": lambda x, w: torch.where(w > 0, x, -x),
    "index": lambda x, w: x[:, w.argmax()],
    "through an integer": lambda x, w: x * w.long(),
    "in two ways": lambda x, w: x * w.detach() + w.exp(),
    "a part": lambda x, w: x[:, :3] + w.split([3, 2])[0],
    "cast": lambda x, w: x + w.to(torch.float64).float(),
}


class Uses(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.v, self._use = nn.Parameter(torch.randn(5)), nn.Parameter(torch.ones(5)), use

    def forward(self, x: Tensor) -> Tensor:
        """[N, 5] -> a number."""
        return (self._use(x * self.v, self.w) ** 2).sum()


@pytest.mark.parametrize("use", list(USES))
def test_a_parameter_is_reached_where_autograd_gives_a_gradient(use: str) -> None:
    module, x = Uses(USES[use]), torch.randn(4, 5)
    graph, signature = functional_graph(export(module, (x,), ({},), use), use)
    names = signature.inputs_to_parameters
    found = {names[node.name] for node in reached(graph) if node.name in names}
    module(x).backward()
    assert found == {name for name, parameter in module.named_parameters() if parameter.grad is not None}


@thorough
def test_trainable_is_what_requires_grad_says() -> None:
    for build in MODELS.values():
        model = build()
        program = hg.capture(model)
        wanted = {name: p.requires_grad for name, p in model.named_parameters()}
        assert {name: p.trainable for name, p in program.parameters.items()} == wanted
        assert program.learning <= {name for name, trains in wanted.items() if trains}
        assert sorted(p.name for b in program.buckets for p in b.parameters) == sorted(wanted)


@thorough
def test_what_gets_no_gradient_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    program = hg.capture(MODELS["unreached and unused"]())
    unused, unreached = (record.getMessage() for record in caplog.records if record.name.endswith("_parameters"))
    assert "no block uses" in unused
    assert "extra.weight, extra.bias" in unused
    assert "idle" in unused
    assert "the loss does not use" in unreached
    assert unreached.count("silent") == 2 * (LAYERS - 1)
    kept = {p.name for p in program.buckets[-1].parameters}
    assert kept == {n for n in program.parameters if "idle" in n or "extra" in n}


def test_layers_below_a_detached_state_learn_nothing() -> None:
    class Cut(Own):
        def __init__(self) -> None:
            super().__init__(layers=0)
            self.stack, self.norm = small(layers=2).stack, Detach(32)

    class Detach(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            """[T, H] -> [T, H], which passes no gradient on."""
            return super().forward(x.detach())

    program = hg.capture(Cut())
    assert program.learning == {"norm.weight", "norm.bias", "out.weight", "out.bias"}
    assert program.outline.lowest == len(program.blocks) - 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_parameters_that_are_no_floats_are_refused(dtype: torch.dtype) -> None:
    model = llama(layers=2)
    model.model.layers[1].code = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    with pytest.raises(hg.Unsupported, match=r"model\.layers\.1\.code: the parameter is"):
        hg.capture(model)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(8), nn.LazyBatchNorm1d(affine=False)])
def test_what_has_no_shape_yet_is_refused(lazy: nn.Module) -> None:
    model = Own(layers=1)
    model.norm = lazy  # pyrefly: ignore[bad-assignment]
    with pytest.raises(
        hg.Unsupported, match=r"norm\.\w+: the tensor has no shape before the first input.*; call the model once"
    ):
        hg.compile(model, hg.Strategy.parse("<tp1,pp1>", 1), None, device="cpu")
