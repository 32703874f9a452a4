"""Size and dtype of the hidden state, and dtype of the loss."""

from __future__ import annotations

import torch

from hydragraph.ir.graph_data import form_of, results_of
from hydragraph.ir.program import Program
from hydragraph.private.graph_values import TensorForm


def hidden_size(program: Program) -> int:
    """Return the size H of hidden states [1, T, H]."""
    return int(_output(program, 0).sizes[-1])


def hidden_dtype(program: Program) -> torch.dtype:
    return _output(program, 0).dtype


def loss_dtype(program: Program) -> torch.dtype:
    return _output(program, -1).dtype


def _output(program: Program, block: int) -> TensorForm:
    # `form_of` skips building the fake tensor, which takes half a second.
    form = form_of(results_of(program.templates[program.blocks[block].template].graph)[0])
    assert form is not None
    return form
