"""Prepared iterations are built once, and kept up to a limit."""

from __future__ import annotations

from unittest import mock

from hydragraph.ir.layout import home
from hydragraph.passes.variants import Variants
from hydragraph.runtime import prepared_programs
from hydragraph.runtime.prepared_programs import Preparer
from hydragraph.spec.strategy import Strategy
from tests.models import captured


def preparer(capacity: int, ranks: int = 1) -> Preparer:
    program, model = captured("llama")
    homes = {bucket.name: home(bucket.size, range(ranks)) for bucket in program.buckets}
    return Preparer(program, Variants(program), dict(model.named_buffers()), homes, 0, ranks, capacity)


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
        assert again.blocks["layer.0"].variant is second.blocks["layer.0"].variant  # no block is compiled twice
        assert prepare.call_count == 4


def test_exchanges_are_shared_and_those_used_last_are_kept() -> None:
    strategies = [Strategy.parse(f"<[{r}]x1,[{r + 1}]x1>", layers=2) for r in range(1, 11, 2)]
    prepares, buckets = preparer(capacity=2, ranks=11), len(captured("llama")[0].buckets)
    with mock.patch.object(prepared_programs, "pull_exchange", wraps=prepared_programs.pull_exchange) as made:
        first = prepares.get(strategies[0], (1,), "train")
        needed = made.call_count
        assert 1 < needed <= buckets
        other = prepares.get(strategies[0], (2,), "train")
        assert made.call_count == needed, "another count of micro-batches moves the same slices"
        assert all(other.pulls[name] is pull for name, pull in first.pulls.items())
        for strategy in strategies[1:]:
            prepares.get(strategy, (1,), "train")
        assert made.call_count == len(strategies) * needed
        again = prepares.get(strategies[0], (1,), "train")
        assert made.call_count == (len(strategies) + 1) * needed, "forgotten, as other strategies have been used since"
        assert again.program == first.program
        assert again.pulls.keys() == first.pulls.keys()


def test_modes_are_kept_apart() -> None:
    prepares, strategy = preparer(capacity=2), Strategy.parse("<tp1,pp1>", layers=2)
    assert prepares.get(strategy, (1,), "train").program != prepares.get(strategy, (1,), "evaluate").program
