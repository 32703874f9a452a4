"""Templates of blocks: shared by equal layers, and equal to the model's own block for any number of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, fx, nn

from hydragraph.capture.templates import capture_template
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program
from tests.capture.test_skeleton import Layer, Model, skeleton
from tests.models import captured


def run(program: Program, model: nn.Module, block: Block, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run one block's template with the model's weights and `values` for its other inputs."""
    template = program.templates[block.template]
    held = dict([*model.named_parameters(), *model.named_buffers()])
    arguments = [held[name] for name in (*block.parameters, *block.buffers)]
    return _Executed(template.graph).run(*arguments, *(values[name] for name in template.inputs))


class _Executed(fx.Interpreter):
    """Runs a template as it stands: one device holds everything, so nothing is communicated."""

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        return args[0] if target is communicate else super().call_function(target, args, kwargs)


def batch(lengths: list[int], vocab: int = 101) -> dict[str, Tensor]:
    """Pack random sequences of the given lengths."""
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(0, vocab, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    labels = torch.cat([torch.cat([ids[0, a + 1 : b], torch.tensor([-100])]) for a, b in pairwise(bounds.tolist())])
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": labels[None],
        "cu_seqlens": bounds,
        "max_length": torch.tensor(max(lengths)),
    }


def with_aux(block: Block, values: dict[str, Tensor], aux: tuple[Tensor, ...], inputs: tuple[str, ...]) -> dict[str, Tensor]:
    """Add a block's inputs "other.*" from the aux graph's outputs."""
    others = [name for name in inputs if name.startswith("other.")]
    return values | {name: aux[i] for name, i in zip(others, block.aux, strict=True)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equal_layers_share_one_template(name: str) -> None:
    program, _ = captured(name)
    assert program.layers == 2
    assert len({block.template for block in program.blocks[1:-1]}) == 1
    assert len({block.template for block in program.blocks}) == 3


@pytest.mark.parametrize("lengths", [[2], [1, 1], [3], [1, 5, 1], [120, 79, 1]])
def test_a_template_computes_what_the_models_block_computes(lengths: list[int]) -> None:
    program, model = captured("llama")
    given, generator = batch(lengths), torch.Generator().manual_seed(1)
    hidden = torch.randn(1, sum(lengths), 64, generator=generator)
    block = program.blocks[2]
    inputs = program.templates[block.template].inputs
    aux = run(program, model, program.aux, given)
    (found,) = run(program, model, block, with_aux(block, given | {"hidden": hidden}, aux, inputs))
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        positions = torch.arange(b - a)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        mask = torch.full((b - a, b - a), float("-inf")).triu(1)[None, None]
        alone = model.model.layers[1](hidden[:, a:b], attention_mask=mask, position_embeddings=rotary)
        torch.testing.assert_close(found[:, a:b], alone[0] if isinstance(alone, tuple) else alone, rtol=1e-5, atol=1e-5)


class Indexed(Layer):
    """A block that scales by its own depth."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden: Tensor, positions: Tensor, flag: bool = True) -> Tensor:
        return hidden + self.linear(hidden) / (self.layer_idx + 1)


def test_a_block_that_computes_with_its_index_stands_alone() -> None:
    from hydragraph.capture.blocks import meta_copy

    def made(*layers: Layer) -> tuple[str, bool]:
        model = meta_copy(Model(*layers), torch.float32)
        _, sites = skeleton(model)
        template, alone = capture_template(sites[-1], {"s53": 64})
        return template.name, alone

    assert made(Indexed(0), Indexed(1))[1]
