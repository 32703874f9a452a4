"""Random instances keep every promise; `python -m tests.planner.instances --count 10000` runs many more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydragraph import planner
from tests.planner.instances import FORMS, broken, broken_by, draw, one_f_one_b
from tests.thorough import first, thorough

RANGES = [range(first, first + 100) for first in range(0, 300, 100)]


@thorough
@pytest.mark.parametrize("seeds", first(RANGES[:1], RANGES), ids=lambda r: f"{r.start}-{r.stop - 1}")
def test_no_promise_is_broken(seeds: range) -> None:
    assert not {seed: what for seed in seeds if (what := broken(draw(seed)))}


def test_instances_depend_on_their_seed_alone_and_cover_every_case() -> None:
    drawn = [draw(seed) for seed in range(300)]
    assert [(i.form, i.candidates, i.lengths) for i in drawn] == [
        (i.form, i.candidates, i.lengths) for i in map(draw, range(300))
    ]
    assert {i.form for i in drawn} == set(FORMS)
    fits = {i.form: [max(i.lengths, default=0) <= i.reach(c) for c in i.candidates] for i in drawn}
    assert not any(fits["too long for all"])
    assert any(len({max(i.lengths) <= i.reach(c) for c in i.candidates}) == 2 for i in drawn if i.form == "mixed")
    assert any(pp > 1 for i in drawn for c in i.candidates for _, pp in c)


def test_every_promise_is_looked_at() -> None:
    given = next(
        i
        for i in map(draw, range(1000))
        if i.form == "mixed" and len(i.candidates[0]) > 1 and i.reach(i.candidates[0]) >= max(i.lengths)
    )
    strategy = given.candidates[0]
    plan = planner.assign(strategy, given.profile, given.lengths, seed=given.seed)
    assert broken_by(plan, strategy, given) == []
    busy = next(p for p, batches in enumerate(plan.micro_batches) if batches)
    batches = plan.micro_batches
    lost = (*batches[:busy], batches[busy][1:], *batches[busy + 1 :])
    twice = (*batches[:busy], (*batches[busy], batches[busy][0]), *batches[busy + 1 :])
    for changed, sentence in (
        (replace(plan, micro_batches=lost), "not every sequence exactly once"),
        (replace(plan, micro_batches=twice), "not every sequence exactly once"),
        (replace(plan, micro_batches=batches[:-1]), "another number of pipelines"),
        (replace(plan, seconds=plan.seconds * 1.001), "seconds is"),
        (replace(plan, bound=plan.seconds * 1.001), "the bound"),
    ):
        assert any(what.startswith(sentence) for what in broken_by(changed, strategy, given)), sentence
    joined = tuple((tuple(i for batch in p for i in batch),) if p else () for p in batches)
    tight = replace(given.profile, limits=dict.fromkeys(given.profile.schemes, 1))
    found = broken_by(replace(plan, micro_batches=joined), strategy, replace(given, profile=tight))
    assert any("more than MaxLen tokens" in what for what in found)


def test_the_recurrence_of_equal_micro_batches_is_the_closed_form() -> None:
    for stages in range(1, 5):
        for count in range(1, 7):
            assert one_f_one_b([3.0] * count, stages) == pytest.approx(3.0 * (count + stages - 1))
    assert one_f_one_b([], 3) == 0.0
