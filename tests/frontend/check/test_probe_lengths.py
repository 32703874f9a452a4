"""Sequences reach beyond what a model's settings name, as far as its positions allow."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForMaskedLM

from hydragraph.frontend.capture import capture
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.numeric_check import check
from hydragraph.frontend.check.probe_lengths import LONGEST, lengths_of
from hydragraph.frontend.check.probe_sequences import batches, draw_sequences, ids_of
from hydragraph.ir.program import Program
from tests.models import captured, randomised, tiny
from tests.own_models import Own, small
from tests.thorough import thorough


def of(**settings: Any) -> tuple[nn.Module, Program]:
    """Return a captured Llama whose config says more afterwards."""
    program, shared = captured("llama")
    model = copy.deepcopy(shared)  # other tests have it, too
    model.config.update({"attention_chunk_size": None, "sliding_window": None} | settings)
    return model, program


def test_the_second_sequence_lies_beyond_every_window_and_chunk() -> None:
    model, program = of()
    assert lengths_of(model, program, 1000).tokens == (5, 11, 3)
    model, program = of(attention_chunk_size=8, sliding_window=40)
    assert lengths_of(model, program, 1000).tokens[1] == 43


def test_what_is_too_long_is_said() -> None:
    model, program = of(max_position_embeddings=4096, sliding_window=1024)
    found = lengths_of(model, program, 1000)
    assert max(found.tokens) <= LONGEST
    assert ("sliding_window", 1024) in found.untouched
    assert lengths_of(model, program, 500_000_000).tokens[2:] == ()  # a large block: two sequences


def test_a_table_of_positions_bounds_lengths() -> None:
    model = randomised(small())
    model.window = 500  # pyrefly: ignore[bad-argument-type]
    assert max(lengths_of(model, capture(model), 1000).tokens) <= 128


class Shifted(Own):
    """Its table begins with five rows that no token has."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, outputs]."""
        return super().forward(input_ids + 5, position_ids, cu_seqlens)


@thorough
def test_ids_that_a_model_shifts_stay_within_its_table() -> None:
    model = randomised(Shifted())
    ids = ids_of(model, capture(model))
    assert ids.count == 96
    assert int(ids.draw(4000, torch.Generator().manual_seed(0)).max()) == 95
    assert not check(CheckedModel(model, capture(model))).problem


def test_special_ids_are_not_drawn_and_batches_differ_in_size() -> None:
    settings = tiny(pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = randomised(RobertaForMaskedLM(RobertaConfig(**settings)))
    program = capture(model)
    lengths, ids = lengths_of(model, program, 1000), ids_of(model, program)
    assert ids.count == 101
    assert 1 in ids.special
    sequences = draw_sequences(lengths, ids, program, None, 0)
    assert not any(bool((s.ids == 1).any()) for s in sequences)
    assert all(s.targets for s in sequences)
    sizes = [batch["input_ids"].shape[1] for batch, _ in batches(sequences)]
    assert sizes[0] != sizes[1]
    few = replace(ids, labels=2)
    labels = torch.cat([s.labels for s in draw_sequences(lengths, few, program, None, 0)])
    assert set(labels.tolist()) == {-100, 0, 1}
