"""Forms of the tensors that leave blocks: the hidden state, and the summed loss."""

from __future__ import annotations

import torch
from torch import fx

from hydragraph.ir.graph_data import form_of
from hydragraph.ir.program import Program
from hydragraph.private.graph_values import TensorForm


def hidden_size(program: Program) -> int:
    """Return H of the hidden state [1, T, H]."""
    return int(_output(program.templates[program.blocks[0].template].graph).sizes[-1])


def hidden_dtype(program: Program) -> torch.dtype:
    """Return the dtype of the hidden state and its gradient, which may differ from the weights'.

    All blocks keep the dtype of the first one's output (`frontend.skeleton`).
    """
    dtype: torch.dtype = _output(program.templates[program.blocks[0].template].graph).dtype
    return dtype


def loss_dtype(program: Program) -> torch.dtype:
    """Return the dtype of the summed loss."""
    dtype: torch.dtype = _output(program.templates[program.blocks[-1].template].graph).dtype
    return dtype


def _output(graph: fx.GraphModule) -> TensorForm:
    """Return the form of a graph's first output; its value would cost half a second."""
    form = form_of(next(n for n in graph.graph.nodes if n.op == "output").args[0][0])
    assert form is not None
    return form
