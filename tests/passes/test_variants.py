"""Compiled templates that are kept, and the memory layout of shards."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock
from weakref import WeakValueDictionary, ref

import pytest
import torch
from torch.fx import Graph, GraphModule

from hydragraph.frontend.capture import capture
from hydragraph.passes import variants
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import MODELS, captured, llama
from tests.thorough import only, thorough


@pytest.fixture(autouse=True)
def nothing_is_traced() -> Iterator[None]:
    """Make empty variants: what is compiled is not the question here."""

    def empty(*_: object) -> Variant:
        return Variant(GraphModule({}, Graph()), GraphModule({}, Graph()), (), 1, (), (), {}, ())

    shared: WeakValueDictionary[object, Variant] = WeakValueDictionary()
    with mock.patch.object(Variants, "_compile", empty), mock.patch.object(variants, "_shared", shared):
        yield


def test_equal_layers_share_a_variant_and_the_least_recently_used_is_forgotten() -> None:
    program, _ = captured("llama")
    kept_two = Variants(program, capacity=2)
    layer, head = program.blocks[1], program.blocks[-1]
    kept = kept_two.get(layer, StagePart())
    assert kept_two.get(program.blocks[2], StagePart()) is kept
    other = ref(kept_two.get(head, StagePart()))
    assert kept_two.get(layer, StagePart()) is kept  # now the head's is the older one
    kept_two.get(layer, StagePart(StageKind(2)))
    assert len(kept_two) == 2
    assert kept_two.get(layer, StagePart()) is kept
    gc.collect()
    assert other() is None


@thorough
def test_executables_of_one_model_share_what_they_compile(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hydragraph.passes.variants")
    one, two = (Variants(capture(MODELS["llama"]())) for _ in range(2))
    for a, b in zip(one.program.blocks, two.program.blocks, strict=True):
        assert one.get(a, StagePart(StageKind(2))) is two.get(b, StagePart(StageKind(2)))
    names = ("embed", "layer.0", "head")
    reused = [f"reused {name}, which this process had compiled, for rank 0 of tp2" for name in names]
    assert [m for m in caplog.messages if m.startswith("reused")] == reused
    assert [m.split(" in ")[0] for m in caplog.messages if m.startswith("compiled")] == [
        f"compiled {name} (eager) for rank 0 of tp2" for name in names
    ]
    assert one.get(one.program.blocks[1], StagePart()) is not two.get(two.program.blocks[1], StagePart(StageKind(2)))


@only("partitioner", "added", "dtype")
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: Variants(capture(llama(layers=2, width=104))), marks=thorough),
        lambda: Variants(capture(llama(layers=2, kv=4))),
        lambda: Variants(captured("llama")[0], "default"),
        lambda: Variants(captured("llama")[0], added=True),
        lambda: Variants(replace(captured("llama")[0], dtype=torch.bfloat16)),
    ],
    ids=["width", "heads", "partitioner", "added", "dtype"],
)
def test_what_differs_is_compiled_apart(other: Callable[[], Variants]) -> None:
    theirs, ours = other(), Variants(captured("llama")[0])
    assert theirs.get(theirs.program.blocks[1], StagePart()) is not ours.get(ours.program.blocks[1], StagePart())
