"""Dynamic NTK and longrope: right for sequences up to where the frequencies change, and longer ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from tests import reference
from tests.models import randomised, sequences, tiny
from tests.thorough import only

ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8],
        "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
        "original_max_position_embeddings": 16,
    },
}


def model(kind: str) -> nn.Module:
    settings = tiny(num_hidden_layers=1, max_position_embeddings=24, rope_parameters=dict(ROPES[kind]))
    return randomised(LlamaForCausalLM(LlamaConfig(**settings)))


@only("dynamic-24")
@pytest.mark.parametrize(("kind", "most"), [("dynamic", 24), ("longrope", 16)])
def test_each_sequence_has_the_frequencies_of_its_own_length(kind: str, most: int) -> None:
    whole = model(kind)
    data: list[Tensor] = sequences([most, 9, most - 1])
    wanted = reference.train(whole, [data], lambda p: torch.optim.SGD(p, lr=0.0))
    exe = hg.compile(whole, "<tp1,pp1>", device="cpu")
    found, loss = exe.gradients(data), exe.evaluate(data).loss
    assert loss == pytest.approx(wanted.losses[0], rel=1e-5)
    name, ratio = reference.worst(found, wanted.gradients[0])
    assert ratio <= 1, name
    with pytest.raises(ValueError, match=rf"sequence 1 has {most + 1} tokens, but .* has {most} positions; truncate"):
        exe.evaluate(sequences([5, most + 1]))
    exe.close()


@only("longrope-20")
@pytest.mark.parametrize(("kind", "long"), [("dynamic", 30), ("longrope", 20)])
def test_frequencies_of_a_long_sequence_are_refused_until_a_short_one_was_run(kind: str, long: int) -> None:
    whole = model(kind)
    whole(torch.zeros(1, long, dtype=torch.int64))
    with pytest.raises(Unsupported, match=rf"model.rotary_emb: a long sequence .* frequencies \({kind}\)"):
        capture(whole)
    whole(torch.zeros(1, 4, dtype=torch.int64))
    capture(whole)
