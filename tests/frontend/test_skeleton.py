"""The skeleton of small hand-made models: opaque blocks in order, sites, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.packed_inputs import FIELDS
from hydragraph.frontend.skeleton import BlockCall, FlatBlock, TracedModel, capture_skeleton, hidden_output, node_inputs
from tests.own_models import Own, small
from tests.thorough import only


class Layer(nn.Module):
    """A residual product with a switch for how it misbehaves."""

    def __init__(self, form: str = "plain") -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(8, 8), form

    def forward(self, hidden: Tensor, positions: Tensor, flag: bool = True) -> Any:
        out = hidden + self.linear(hidden) * positions.unsqueeze(-1)
        if self.form == "shorter":
            return out[..., :4]
        return {"plain": out, "tuple": (out, None), "two": (out, out)}[self.form]


class Model(nn.Module):
    def __init__(self, *layers: Layer, order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(11, 8), nn.ModuleList(layers), nn.Linear(8, 11)
        self.order = range(len(layers)) if order is None else order

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, positions = self.embed(ids), positions.float()
        for i in self.order:
            out = self.layers[i](hidden, positions, flag=False)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.head(hidden)


def skeleton(model: Model) -> tuple[torch.export.ExportedProgram, list[BlockCall]]:
    model.to("meta")
    traced = TracedModel(
        model,
        lambda m, batch: m(batch["input_ids"], batch["position_ids"]),
        lambda logits, batch: logits.sum(),
    )
    return capture_skeleton(traced, model.layers, {"T": 64, "N+1": 5}, FIELDS)


@pytest.mark.parametrize("form", ["plain", "tuple"])
def test_blocks_are_opaque_and_in_order(form: str) -> None:
    model = Model(Layer(form), Layer(form), Layer(form))
    exported, sites = skeleton(model)
    (node,) = [n for n in exported.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    hidden, others = node_inputs(node)
    assert (hidden.target, len(others)) == (torch.ops.aten.embedding.default, 1)
    assert [s.feeds for s in sites] == [(0,)] * 3
    assert [s.name for s in sites] == ["layer.0", "layer.1", "layer.2"]
    assert all(s.module is layer for s, layer in zip(sites, model.layers, strict=True))
    assert [len(s.inputs) for s in sites] == [2, 2, 2]
    assert {s.called() for s in sites} == {sites[0].called()}
    assert False in sites[0].leaves


@pytest.mark.parametrize(("frozen", "refused"), [("nothing", True), ("layers", True), ("all", False)])
def test_blocks_without_gradients_are_frozen_and_have_only_frozen_parameters_before_them(
    frozen: str, refused: bool
) -> None:
    class Partly(Model):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            hidden = self.embed(ids)
            with torch.no_grad():
                for layer in self.layers:
                    hidden = layer(hidden, positions.float())
            return self.head(hidden)

    model = Partly(Layer(), Layer())
    model.embed.requires_grad_(frozen != "all")
    model.layers.requires_grad_(frozen == "nothing")
    message = r"layer.0: the model runs this block under torch.no_grad\(\), .*; freeze these parameters"
    with pytest.raises(Unsupported, match=message) if refused else nullcontext():
        skeleton(model)


def test_a_site_runs_its_block_with_the_models_arguments() -> None:
    torch.manual_seed(0)
    real, model = Layer("tuple"), Model(Layer("tuple"))
    _, (site,) = skeleton(model)
    site.module = real
    hidden, positions = torch.randn(1, 5, 8), torch.randn(1, 5)
    assert torch.equal(FlatBlock(site)(hidden, positions), real(hidden, positions)[0])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Model(Layer("two")),
            r"layer.0: the block returns 2 tensors \(\(a tensor, a tensor\)\), but only its hidden state.*; return",
        ),
        (
            Model(Layer("shorter")),
            "layer.0: the block turns a hidden state of .* into .*4.*; keep the shape and dtype",
        ),
        (
            Model(Layer(), Layer(), order=(1, 0)),
            r"Model: the model calls its blocks in the order \['layer.1', 'layer.0'\]",
        ),
        (
            Model(Layer(), Layer(), order=(0, 0, 1)),
            "but must call each block once, in list order; list the blocks in the order .*, or pass blocks=",
        ),
        (Model(Layer(), Layer(), order=(0,)), "but must call each block once, in list order"),
    ],
)
def test_other_forms_of_blocks_are_refused(model: Model, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        skeleton(model)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: (None, x, 3), lambda x: {"hidden": x}])
def test_the_hidden_state_is_found_and_replaced(wrap: Any) -> None:
    x, y = torch.zeros(2), torch.ones(2)
    hidden, rebuild = hidden_output(wrap(x), "layer.0")
    assert hidden is x
    assert type(rebuild(y)) is type(wrap(y))
    assert hidden_output(rebuild(y), "layer.0")[0] is y


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (None, "returns no tensor (None)"),
        ({"h": torch.zeros(2), "aux": torch.zeros(())}, "returns 2 tensors ({'h': a tensor, 'aux': a tensor})"),
        ((torch.zeros(2), [torch.zeros(1, dtype=torch.int64)]), "2 tensors ((a tensor, (a tensor of torch.int64)))"),
        (object(), "returns no tensor (object)"),
    ],
)
def test_other_outputs_are_refused_with_what_they_are(output: Any, said: str) -> None:
    with pytest.raises(
        Unsupported, match=f"^layer.0: the block .*{re.escape(said)}, but only its hidden state.*; return only the hid"
    ):
        hidden_output(output, "layer.0")


class Keyed(Model):
    """Hands its blocks integers first, and the hidden state by name."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(positions=positions, hidden=hidden)
        return self.head(hidden)


def test_the_hidden_state_may_stand_behind_integers() -> None:
    model = Keyed(Layer(), Layer())
    _, sites = skeleton(model)
    assert [[t.dtype for t in site.inputs] for site in sites] == [[torch.float32, torch.int64]] * 2
    hidden, positions = torch.randn(1, 5, 8), torch.arange(5)[None]
    site, real = sites[1], Layer()
    site.module = real
    assert torch.equal(FlatBlock(site)(hidden, positions), real(hidden, positions))


class Across(Model):
    """Hands its blocks [T, 1, H], as models of old do."""

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, positions = self.embed(ids).transpose(0, 1), positions.float().transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return self.head(hidden.transpose(0, 1))


def test_tokens_that_lie_along_the_first_dimension_are_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"layer.0: the hidden state has the shape \[\w+, 1, 8\]; pass the hidden state as \[1, T, H"
    ):
        skeleton(Across(Layer(), Layer()))


class Between(Model):
    """A model that computes with what goes from one block to the next."""

    def __init__(self, what: Callable[[list[Tensor]], Any]) -> None:
        super().__init__(Layer(), Layer(), Layer())
        self.what = what

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        states = [self.embed(ids)]
        for layer in self.layers:
            states.append(layer(states[-1], positions.float()))
        return self.head(states[-1]) + self.what(states)


@only("<lambda>3")
@pytest.mark.parametrize(
    "what",
    [
        lambda s: s[1].sum(),
        lambda s: torch.stack(s).sum(),
        lambda s: s[2].flatten()[:0].sum(),
        lambda s: s[1].mul(2).add(s[2]).sum(),
        lambda s: s[1].detach().sum(),
    ],
)
def test_a_state_between_blocks_that_is_used_is_a_value_of_the_trace(
    what: Callable[[list[Tensor]], Any],
) -> None:
    exported, sites = skeleton(Between(what))
    nodes = [n for n in exported.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    assert [n.args[2] for n in nodes] == ["layer.0", "layer.1", "layer.2"]
    for before, after in pairwise(nodes):
        assert node_inputs(after)[0] is before
    assert [s.feeds for s in sites] == [None] * 3
    assert any(len(n.users) == 2 for n in nodes)


def test_a_computation_between_blocks_is_refused() -> None:
    class Scaling(Own):
        def __init__(self) -> None:
            super().__init__(layers=0)
            self.stack = small(layers=2).stack

        def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            x = (self.tokens(input_ids) + self.places(position_ids))[0]
            for block in self.stack:
                x = block(x, cu_seqlens) * 0.5
            return self.out(self.norm(x))[None]

    with pytest.raises(
        Unsupported, match=r"layer.1: this block's input is not the previous block's output; move the computation"
    ):
        capture(Scaling())


def test_blocks_that_take_different_things_are_fed_what_each_takes() -> None:
    class Feeding(Model):
        def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
            hidden, one, two = self.embed(ids), positions.float(), positions * 0.5
            for layer, given in zip(self.layers, (one, two, one), strict=True):
                hidden = layer(hidden, given)
            return self.head(hidden)

    exported, sites = skeleton(Feeding(Layer(), Layer(), Layer()))
    assert [s.feeds for s in sites] == [(0,), (1,), (0,)]
    (node,) = [n for n in exported.graph.nodes if n.target is torch.ops.hydragraph.block.default]
    assert [n.target for n in node_inputs(node)[1]] == [torch.ops.aten.to.dtype, torch.ops.aten.mul.Tensor]


class Reads(Model):
    """A model that reads something of its blocks besides calling them."""

    def __init__(self, what: Callable[[Reads], Any], *layers: Layer) -> None:
        super().__init__(*layers)
        self.what = what

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return super().forward(ids, positions) * self.what(self)


@pytest.mark.parametrize(
    "what",
    [
        lambda m: 2.0 if isinstance(m.layers[0], Layer) and m.layers[0].form == "plain" else 1.0,
        lambda m: 2.0 if type(m.layers[0]).__name__ == "Layer" and len(m.layers) == 2 else 1.0,
        lambda m: 2.0 if m.layers[0].linear.in_features == 8 and not m.layers[0].training else 1.0,
    ],
    ids=["class", "name", "parts"],
)
def test_blocks_without_their_parameters_look_like_themselves(what: Callable[[Reads], Any]) -> None:
    exported, _ = skeleton(Reads(what, Layer("plain"), Layer("plain")).eval())
    assert set(exported.graph_signature.inputs_to_parameters.values()) == {
        *("model.embed.weight", "model.head.weight", "model.head.bias")
    }
    assert [n.args[1] for n in exported.graph.nodes if n.target is torch.ops.aten.mul.Tensor] == [2.0]


def test_a_parameter_of_a_block_that_the_model_uses_stays_a_parameter() -> None:
    exported, _ = skeleton(Reads(lambda m: m.layers[1].linear.weight.sum(), Layer("plain"), Layer("plain")))
    used = {n.name for n in exported.graph.nodes if n.op == "placeholder" and n.users}
    names = exported.graph_signature.inputs_to_parameters
    assert "model.layers.1.linear.weight" in {names.get(n) for n in used}
    assert not exported.graph_signature.inputs_to_lifted_tensor_constants


class Registered(Layer):
    """A block whose subclasses must say something, so that no stand-in of its kind can be made."""

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()


def test_blocks_that_nothing_can_stand_in_for_are_traced_themselves() -> None:
    exported, sites = skeleton(Model(Registered(), Registered()))
    assert [s.name for s in sites] == ["layer.0", "layer.1"]
    assert "model.layers.0.linear.weight" in exported.graph_signature.inputs_to_parameters.values()
