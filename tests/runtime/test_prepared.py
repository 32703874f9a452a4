"""Prepared iterations are built once, and only as many are kept as there is room for."""

from __future__ import annotations

from unittest import mock

from hydragraph.ir.layout import home
from hydragraph.runtime.prepared import Preparer
from hydragraph.runtime.variants import Variants
from hydragraph.spec.strategy import Strategy
from tests.models import captured


def preparer(capacity: int) -> Preparer:
    program, model = captured("llama")
    homes = {bucket.name: home(bucket.size, range(1)) for bucket in program.buckets}
    return Preparer(program, Variants(program), dict(model.named_buffers()), homes, 0, 1, capacity)


def test_the_least_recently_used_iteration_is_forgotten_and_prepared_again() -> None:
    prepares, strategy = preparer(capacity=2), Strategy.parse("<tp1,pp1>", layers=2)
    with mock.patch.object(prepares, "_prepare", wraps=prepares._prepare) as prepare:
        first = prepares.get(strategy, (1,), "train")
        second = prepares.get(strategy, (2,), "train")
        assert prepares.get(strategy, (1,), "train") is first
        assert prepare.call_count == 2
        prepares.get(strategy, (3,), "train")  # for which (2,) has to go
        assert prepares.get(strategy, (1,), "train") is first
        assert prepare.call_count == 3
        again = prepares.get(strategy, (2,), "train")
        assert again is not second
        assert again.program == second.program
        assert again.blocks["layer.0"].variant is second.blocks["layer.0"].variant  # nothing is compiled twice
        assert prepare.call_count == 4


def test_modes_are_kept_apart() -> None:
    prepares, strategy = preparer(capacity=2), Strategy.parse("<tp1,pp1>", layers=2)
    assert prepares.get(strategy, (1,), "train").program != prepares.get(strategy, (1,), "evaluate").program
