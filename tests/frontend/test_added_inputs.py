"""A field that a part of a model is not handed becomes one more input of it."""

from __future__ import annotations

import torch
from torch import fx

from hydragraph.frontend.added_inputs import ADDED, added_input
from hydragraph.frontend.packed_inputs import FIELDS


def test_an_input_is_added_once_behind_the_others() -> None:
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    graph.output(hidden)
    added = added_input(graph, "added_positions", lambda: torch.zeros(1, 5, dtype=torch.int64))
    assert added_input(graph, "added_positions", lambda: torch.zeros(0)) is added
    assert added.meta["val"].shape == (1, 5)
    assert [node.name for node in graph.nodes] == ["hidden", "added_positions", "output"]


def test_all_added_inputs_are_fields() -> None:
    assert set(ADDED.values()) < FIELDS.keys()
