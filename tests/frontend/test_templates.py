"""Templates of blocks: shared by equal layers, and equal to the model's own block for any number of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.frontend.execute import batch, run, with_aux
from tests.models import captured


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
