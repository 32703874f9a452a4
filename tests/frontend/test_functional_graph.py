"""Functional graphs: what writes in place is rewritten, what has no gradient has none; hidden writes are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import flex_attention

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.functional_graph import export, functional_graph
from tests.own_models import Small, small
from tests.thorough import only, thorough


class Doing(Small):
    """A block that also does what a test wants."""

    def __init__(self, does: Callable[[Doing, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("seen", torch.ones(32))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.does(self, super().forward(x, cu_seqlens), x)


KEPT: list[Tensor] = []


def kept_from_another_block(block: Doing, y: Tensor, x: Tensor) -> Tensor:
    KEPT.append(x)
    return y + KEPT[0]


def attending_freely(block: Doing, y: Tensor, x: Tensor) -> Tensor:
    heads = x.view(1, -1, 4, 8).transpose(1, 2)
    return y + flex_attention(heads, heads, heads)[0].transpose(0, 1).flatten(1)


def counted(block: Doing, y: Tensor, x: Tensor) -> Tensor:
    return y / torch.tensor([float(i) for i in range(1, int(x.shape[0]) + 1)], device=x.device)[:, None]


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (lambda block, y, x: x.add_(y), "writes in place into its arguments, or into a parameter, at .*x.add_"),
        (lambda block, y, x: F.silu(x, inplace=True) + y, "writes in place into its arguments.*; write into a copy"),
        pytest.param(
            lambda block, y, x: block.up.bias.mul_(2).sum() + y,
            "writes in place into .*, or into a parameter, at ",
            marks=thorough,
        ),
        (lambda block, y, x: y * block.up.weight.data.mean(), "a tensor that the trace does not see.*read through"),
        pytest.param(
            lambda block, y, x: y + torch.vmap(lambda t: t * 2, 1, 1)(x),
            "a tensor that the trace does not see",
            marks=thorough,
        ),
        (
            lambda block, y, x: y + torch.vmap(lambda t: t / (1 + t.norm()))(x),
            "forward transforms a function .* instead of torch.vmap",
        ),
        (lambda block, y, x: torch.func.grad(lambda t: block.up(t).sum())(x), "forward uses torch.func within"),
        pytest.param(
            lambda block, y, x: torch.cond(x.sum() > 0, lambda t: t * 2, lambda t: t * 3, (y,)),
            "layer.0: forward transforms a function.*; use torch.where instead of torch.cond",
            marks=thorough,
        ),
        (attending_freely, r"forward calls flex_attention, .*, at test_functional.*; call hydragraph.varlen_attention"),
        (kept_from_another_block, "forward or loss changes 'the length of the global KEPT'"),
        (counted, "only one number of tokens or sequences.*; remove .tolist"),
        (
            lambda block, y, x: block.nothing(y),
            r"no attribute 'nothing'\), at test_functional_graph.py:\d+, .*block.nothing",
        ),
    ],
)
def test_what_a_trace_cannot_hold_of_a_block_is_refused_in_a_sentence_with_its_line(
    does: Callable[[Doing, Tensor, Tensor], Tensor], message: str
) -> None:
    KEPT.clear()
    model = small()
    model.stack = nn.ModuleList([Doing(does) for _ in range(2)])
    with pytest.raises(Unsupported, match=message):
        capture(model)


def test_a_decision_on_a_value_is_refused_without_the_text_that_pytorch_prints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def checked(block: Doing, y: Tensor, x: Tensor) -> Tensor:
        assert not torch.isnan(y).any()
        return y

    model = small()
    model.stack = nn.ModuleList([Doing(checked) for _ in range(2)])
    message = r"Own: a Python decision depends on a tensor's value .*isnan\(y\).any\(\)'; choose values with"
    with pytest.raises(Unsupported, match=message) as caught:
        capture(model)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_labels_that_a_loss_shifts_again_are_refused_in_a_sentence() -> None:
    def shifted(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits[0, :-1], given["labels"][0, 1:], reduction="sum")

    with pytest.raises(
        Unsupported, match=r"Own: the graph changes with the number of .*; .* labels are already at the"
    ):
        capture(small(), loss=shifted)


class Scaled(nn.Module):
    """A model of one weight and one function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self.weight, x)


def plain(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x).reshape(-1)


def partly_without_gradient(weight: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (weight * x).exp().sum()
    return weight * x * scale


def in_place(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    y.add_(1).mul_(weight)
    return y * y


def in_place_beside_a_region(weight: Tensor, x: Tensor) -> Tensor:
    return partly_without_gradient(weight, x).add_(1)


def in_place_inside_a_region(weight: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (weight * x).exp()
        scale.add_(1)
    return weight * scale


def through_detach(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    y.detach()[:2].mul_(2)
    return y * weight


def without_gradient_from_outside(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    with torch.no_grad():
        y.view(-1).clamp_(-1, 1)
    return y * weight


def in_place_of_a_detached_copy(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    return y * y.detach().clone().mul_(2)


IN_PLACE_AND_WITHOUT_GRADIENT = [in_place_beside_a_region, in_place_inside_a_region, in_place_of_a_detached_copy]


def functional(function: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    exported = torch.export.export(Scaled(function), (torch.ones(3),), strict=False)
    return functional_graph(exported, "Scaled")[0]


@only("plain", "partly_without_gradient", "in_place", "in_place_beside_a_region")
@pytest.mark.parametrize("function", [plain, partly_without_gradient, in_place, *IN_PLACE_AND_WITHOUT_GRADIENT])
def test_values_and_gradients_are_the_models(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph, model, x = functional(function), Scaled(function), torch.tensor([1.0, 2.0, -0.5])
    expected, found = model(x), graph(model.weight, x)[0]
    torch.testing.assert_close(found, expected)
    (gradient,), (given,) = (torch.autograd.grad(y.sum(), model.weight) for y in (expected, found))
    torch.testing.assert_close(given, gradient)


def test_a_graph_that_writes_nothing_keeps_its_operators() -> None:
    assert torch.ops.aten.reshape.default in [node.target for node in functional(plain).graph.nodes]


def test_no_operator_writes() -> None:
    targets = [node.target for node in functional(in_place).graph.nodes if node.op == "call_function"]
    assert not any(target._schema.is_mutable for target in targets)


@pytest.mark.parametrize(
    ("function", "how"),
    [
        (through_detach, "through .detach"),
        (without_gradient_from_outside, r"under torch.no_grad\(\) into a value from"),
    ],
)
def test_writing_where_a_gradient_does_not_know_of_it_is_refused(
    function: Callable[[Tensor, Tensor], Tensor], how: str
) -> None:
    with pytest.raises(Unsupported, match=rf"^Scaled: forward writes in place {how}.*; write into a copy"):
        functional(function)


@only("held0- (table)")
@pytest.mark.parametrize(
    ("held", "named"), [(torch.ones(32), " (table)"), ([nn.Linear(32, 32)], " (table)"), (None, "")]
)
def test_tensors_that_are_no_part_of_the_model_are_refused_by_the_name_of_their_attribute(
    held: object, named: str
) -> None:
    model, beside = small(layers=2), torch.ones(32)
    block = model.stack[1]
    block.table = held  # pyrefly: ignore[bad-argument-type]
    old = block.forward

    def forward(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        table = block.table[0].bias if isinstance(held, list) else beside if held is None else block.table
        return old(x, cu_seqlens) * table

    block.forward = forward
    with pytest.raises(
        Unsupported,
        match=rf"not a parameter or buffer{re.escape(named)}, which would stay on the CPU; register this tensor",
    ):
        capture(model, blocks="stack")


class Kept(nn.Module):
    """Writes into a buffer of its own by out=, as spectral norm does, under no_grad."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = torch.div(x, 2, out=self.seen)
        return x * seen.clone()


class Clamped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.clamp_(max=1)
        return x * 2


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Kept(), "changes 'seen', but the change would be lost"),
        (Clamped(), "writes in place into its argument 'x'"),
    ],
)
def test_what_is_written_outside_of_the_graph_is_refused_however_it_is_given(module: nn.Module, said: str) -> None:
    exported = torch.export.export(module, (torch.ones(3),), strict=False)
    with pytest.raises(Unsupported, match=said):
        functional_graph(exported, "test")


def filled(x: Tensor, *ends: int) -> Tensor:
    """Write parts of a new tensor, up to each of these features."""
    y = x.new_empty(x.shape)
    for first, end in pairwise((0, *ends)):
        y[..., first:end] = x[..., first:end] * (1 + end)
    return y


@pytest.mark.parametrize(
    ("ends", "joined"), [((8, 32), True), pytest.param((4, 10, 32), True, marks=thorough), ((8, 30), False)]
)
def test_a_tensor_that_is_filled_part_by_part_is_a_concatenation(ends: tuple[int, ...], joined: bool) -> None:
    module, example = Filled(ends), torch.empty(1, 7, 32, device="meta")
    exported = export(module, (example,), ({1: torch.export.Dim("T", min=2, max=1 << 20)},), "block")
    graph = functional_graph(exported, "block")[0]
    targets = [n.target for n in graph.graph.nodes]
    assert (torch.ops.aten.cat.default in targets) is joined
    assert (torch.ops.aten.slice_scatter.default in targets) is not joined
    x = torch.randn(1, 3, 32)
    torch.testing.assert_close(graph(x)[0][..., : ends[-1]], module(x)[..., : ends[-1]])


class Products(nn.Module):
    """Products with the transpose of a weight, however it is written, and with other matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a.T + x @ self.b.transpose(-1, -2) + x @ self.c.permute(1, 0)
        return y + x @ self.a + x @ self.b.transpose(0, 0)


def test_products_with_a_transposed_weight_are_linear_layers() -> None:
    module = Products()
    sizes = ({1: torch.export.Dim("T", min=2, max=1 << 20)},)
    graph = functional_graph(export(module, (torch.empty(1, 7, 8),), sizes, "block"), "block")[0]
    targets = [n.target for n in graph.graph.nodes]
    assert targets.count(torch.ops.aten.linear.default) == 3
    assert targets.count(torch.ops.aten.matmul.default) == 2
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(graph(module.a, module.b, module.c, x)[0], module(x))


class Filled(nn.Module):
    def __init__(self, ends: tuple[int, ...]) -> None:
        super().__init__()
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        return filled(x, *self.ends)
