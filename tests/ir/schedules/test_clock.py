"""The clock that orders the tasks of all ranks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.ir.schedules import clock
from hydragraph.ir.schedules.clock import StageTimes, backwards_of, beats_of, forwards_of
from hydragraph.ir.schedules.schedule import ScheduleShape
from tests.ir.schedules.examples import returning_rows


def test_one_pipeline_ticks_in_halves_of_a_period() -> None:
    ((first, middle, last),) = beats_of(ScheduleShape.alone(3, 4))
    # 8 ticks are one iteration of 4 micro-batches: the picture in the module.
    assert first == StageTimes(0, 0, 0, 5, 2)
    assert middle == StageTimes(0, 0, 1, 4, 2)
    assert last == StageTimes(0, 1, 2, 3, 2)
    assert (last.arrives_at(3), last.forward_at(3), last.backward_at(3)) == (7, 8, 9)


def test_a_stage_of_two_pipelines_takes_them_in_turns_in_half_the_time() -> None:
    (one, last), (other, same) = beats_of(ScheduleShape((3, 3), ((0, 2), (1, 2))))
    assert (one, last) == (StageTimes(0, 0, 0, 5, 4), StageTimes(0, 0, 2, 3, 4))
    assert (other, same) == (StageTimes(3, 2, 2, 7, 4), StageTimes(3, 2, 4, 5, 4))


def test_a_pipeline_of_fewer_micro_batches_gets_fewer_turns() -> None:
    (one, last), (other, same) = beats_of(ScheduleShape((4, 2), ((0, 2), (1, 2))))
    assert other.every == same.every == 2 * one.every == 2 * last.every
    forwards = sorted((last.forward_at(m), m) for m in range(4)) + sorted((same.forward_at(m), m) for m in (4, 5))
    assert [m for _, m in sorted(forwards)] == [0, 1, 4, 2, 3, 5]


def test_two_rounds_tick_as_in_the_picture() -> None:
    shape = ScheduleShape((4,), ((0, 1, 0, 1),))
    for row in (0, 1):
        ticks = sorted((tick, str(action)) for tick, action in (*forwards_of(shape, row), *backwards_of(shape, row)))
        cells = dict(ticks)
        assert len(cells) == len(ticks)  # a row never has two tasks at once
        picture = next(line for line in (clock.__doc__ or "").splitlines() if line.startswith(f"    row {row}"))
        shown = picture.removesuffix(" ...")[13:]
        drawn = {i // 5: cell for i in range(0, len(shown), 5) if (cell := shown[i : i + 5].strip())}
        assert drawn == {tick: cell for tick, cell in cells.items() if tick <= max(drawn)}


@given(returning_rows(), st.integers(1, 9))
def test_what_an_interleaved_task_needs_is_earlier(rows: tuple[int, ...], count: int) -> None:
    (stages,) = beats_of(ScheduleShape((count,), (rows,)))
    for m in range(count):
        times = [beat.forward_at(m) for beat in stages] + [beat.backward_at(m) for beat in reversed(stages)]
        assert all(one < other for one, other in pairwise(times))
        assert [beat.arrives_at(m) for beat in stages[1:]] == [beat.forward_at(m) for beat in stages[:-1]]
        assert [beat.returns_at(m) for beat in stages[1:]] == [beat.backward_at(m) for beat in stages[:-1]]


@st.composite
def joined(draw: st.DrawFn) -> ScheduleShape:
    """Draw pipelines with any counts of micro-batches, some of whose stages are shared."""
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    chain = st.sets(st.integers(0, 5), min_size=1).map(lambda rows: tuple(sorted(rows)))
    return ScheduleShape(tuple(counts), tuple(draw(chain) for _ in counts))


@given(joined())
def test_what_a_task_needs_is_earlier(shape: ScheduleShape) -> None:
    for numbers, stages in zip(shape.micro_batches, beats_of(shape), strict=True):
        for m in numbers:
            times = [beat.forward_at(m) for beat in stages] + [beat.backward_at(m) for beat in reversed(stages)]
            assert all(one < other for one, other in pairwise(times))
            assert [beat.arrives_at(m) for beat in stages[1:]] == [beat.forward_at(m) for beat in stages[:-1]]
            assert [beat.returns_at(m) for beat in stages[1:]] == [beat.backward_at(m) for beat in stages[:-1]]


@given(joined())
def test_no_more_are_alive_than_stages_are_left(shape: ScheduleShape) -> None:
    for numbers, stages in zip(shape.micro_batches, beats_of(shape), strict=True):
        for s, beat in enumerate(stages):
            for m in numbers:
                ahead = [n for n in numbers if n >= m and beat.forward_at(n) < beat.backward_at(m)]
                assert 1 <= len(ahead) <= len(stages) - s
