"""A Program as a value: what ranks compare, and what travels to them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import torch

from hydragraph.ir.program import Program, graph_digest
from tests.models import captured


def program() -> Program:
    return captured("gpt2")[0]  # its embedding is tied to its head


def test_it_travels_to_another_process_unchanged() -> None:
    found = program()
    again: Program = pickle.loads(pickle.dumps(found))
    assert again.fingerprint == found.fingerprint
    assert str(again) == str(found)
    assert {t.content for t in again.templates.values()} == {t.content for t in found.templates.values()}


def test_programs_that_compute_something_else_have_another_fingerprint() -> None:
    found = program()
    layer = found.blocks[1]
    others = [
        replace(found, dtype=torch.bfloat16),
        replace(found, unplaced=1),
        replace(found, blocks=(found.blocks[0], replace(layer, buffers=("other",)), *found.blocks[2:])),
        replace(found, buckets=(replace(found.buckets[0], learns=False), *found.buckets[1:])),
    ]
    assert len({each.fingerprint for each in (found, *others)}) == 5


def test_a_template_is_its_operators_and_shapes() -> None:
    template = next(iter(program().templates.values()))
    other = copy.deepcopy(template.graph)
    assert graph_digest(other) == graph_digest(template.graph)
    product = next(node for node in other.graph.nodes if node.op == "call_function")
    with other.graph.inserting_after(product):
        other.graph.call_function(torch.ops.aten.neg.default, (product,))
    other.recompile()
    assert graph_digest(other) != graph_digest(template.graph)
