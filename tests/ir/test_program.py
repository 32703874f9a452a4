"""A Program as a value: what ranks compare, what travels to them, and its graph of placeholders."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from itertools import pairwise

import torch

from hydragraph.ir.placeholders import communicate, compute, pull, push
from hydragraph.ir.program import Program, graph_digest
from tests.models import captured


def program() -> Program:
    return captured("gpt2")[0]  # its embedding is tied to its head


def test_its_graph_pulls_every_bucket_before_its_first_use_and_pushes_it_once_behind_the_last() -> None:
    nodes = list(program().graph.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    pulls = {node.args[0]: node for node in nodes if node.target is pull}
    pushes = {node.args[0]: node for node in nodes if node.target is push}
    buckets = {bucket.name: bucket for bucket in program().buckets if bucket.blocks}
    assert pulls.keys() == pushes.keys() == buckets.keys()
    for name, bucket in buckets.items():
        uses = [node for node in nodes if node.target is compute and pulls[name] in node.args]
        assert [node.name for node in uses] == [f"h_{block.replace('.', '_')}" for block in bucket.blocks]
        assert at[pulls[name]] < at[uses[0]]
        assert at[pushes[name]] > at[uses[-1]]
        assert pushes[name].args[1:] == tuple(uses)
    assert any(len(bucket.blocks) == 2 for bucket in buckets.values()), "the tied table has a bucket of its own"


def test_hidden_states_may_be_communicated_between_all_neighbours() -> None:
    found = program()
    chain = [node for node in found.graph.nodes if node.target in (compute, communicate)][1:]  # behind aux
    assert [node.target for node in chain] == [*[compute, communicate] * (len(found.blocks) - 1), compute]
    for before, after in pairwise(chain):
        assert before in after.args


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
