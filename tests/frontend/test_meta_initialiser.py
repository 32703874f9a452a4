"""Meta models: all rank counts start with the weights of the model's initialiser, and unset weights are refused."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.engine.state_transition import StateTransition
from hydragraph.errors import Unsupported
from hydragraph.frontend.meta_initialiser import initial_buffers, initial_parameters, is_meta
from tests.models import sequences
from tests.thorough import thorough

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=101,
    num_hidden_layers=3,
    max_position_embeddings=128,
)
GPT2 = GPT2Config(n_embd=64, n_head=4, vocab_size=101, n_layer=3, n_positions=128, bos_token_id=0, eos_token_id=0)
GPT2.attn_pdrop = GPT2.embd_pdrop = GPT2.resid_pdrop = 0.0


def on_meta(kind: type[nn.Module], config: object) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize(("kind", "config"), [(LlamaForCausalLM, LLAMA), (GPT2LMHeadModel, GPT2)])
def test_values_have_the_distribution_of_the_models_own_initialiser(kind: type[nn.Module], config: object) -> None:
    torch.manual_seed(0)
    built, meta = kind(config), on_meta(kind, config)
    found: dict[str, Tensor] = {}
    for part in initial_parameters(meta, seed=7):
        assert not found.keys() & part.keys()
        found |= part
    assert is_meta(meta)
    wanted = {name: parameter.detach() for name, parameter in built.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert found[name].shape == parameter.shape
        assert found[name].dtype == torch.float32
        spread, size = float(parameter.std()), parameter.numel()
        assert float(found[name].std()) == pytest.approx(spread, rel=8 / size**0.5, abs=1e-7), name
        assert float(found[name].mean()) == pytest.approx(float(parameter.mean()), abs=8 * spread / size**0.5 + 1e-7)
    blocks = [n for n in found if "layers.0" in n or "h.0" in n]
    for name in (n for n in blocks if float(found[n].std()) > 0):
        assert not torch.equal(found[name], found[name.replace(".0.", ".1.", 1)]), "every block has its own numbers"
    for name, buffer in built.named_buffers():
        torch.testing.assert_close(initial_buffers(meta)[name], buffer)


def test_the_same_seed_gives_the_same_values_whatever_was_drawn_before() -> None:
    meta = on_meta(LlamaForCausalLM, LLAMA)
    one = list(initial_parameters(meta, seed=3))
    torch.rand(5)
    state = torch.get_rng_state()
    two = list(initial_parameters(meta, seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    other = list(initial_parameters(meta, seed=4))
    for a, b, c in zip(one, two, other, strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
        assert not all(torch.equal(a[n], c[n]) for n in a)


class Unset(nn.Module):
    """A module whose parameter is never initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


def test_what_no_initialiser_sets_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = Unset()
    with pytest.raises(Unsupported, match=r"scale: .*initializer does not set this tensor"):
        list(initial_parameters(model, seed=0))
    model.register_buffer("keep", torch.ones(2, dtype=torch.bool, device="meta"))
    with pytest.raises(Unsupported, match=r"keep: hydragraph cannot tell whether .* sets a bool tensor; build .* CPU"):
        initial_buffers(model)


def test_a_model_that_is_partly_on_meta_is_refused() -> None:
    model = Unset()
    model.layers[0].to("meta")
    with pytest.raises(Unsupported, match=r"2 parameters are on the meta device, such as layers\.0\.weight"):
        is_meta(model)


def test_an_interrupted_initialisation_is_repeated() -> None:
    filled: list[str] = []

    def values() -> Iterator[dict[str, Tensor]]:
        yield {"first": torch.ones(1)}
        if len(filled) == 1:
            raise KeyboardInterrupt
        yield {"second": torch.ones(1)}

    holding = StateTransition(values)
    holding.held = mock.Mock()
    holding.held.home.fill = filled.extend
    with pytest.raises(KeyboardInterrupt):
        holding.begin()
    holding.begin()
    holding.begin()
    assert filled == ["first", "first", "second"]


def start(strategy: str, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(5)
    exe = hg.compile(
        on_meta(LlamaForCausalLM, LLAMA), hg.Strategy.parse(strategy, 3), lambda n: torch.optim.SGD(n, 0.1)
    )
    weights = exe.full_state_dict()
    losses = [exe.step(sequences([9, 4, 17], seed=i)).loss for i in range(steps)]
    exe.close()
    return weights, losses


@thorough
def test_every_number_of_ranks_starts_alike_and_trains() -> None:
    one, losses = start("<tp1,pp1>", 2)
    two, others = hg.launch(start, 2, "<tp2,pp1>", 2)[0]
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert others == pytest.approx(losses, rel=1e-5)
