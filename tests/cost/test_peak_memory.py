from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.peak_memory import PeakMemory

LINES = st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**5)), min_size=1, max_size=4)


@given(lines=LINES, limits=st.lists(st.integers(10**6, 10**10), min_size=1, max_size=4), step=st.sampled_from([1, 64]))
def test_the_most_tokens_of_any_lines_wherever_the_search_begins(
    lines: list[tuple[int, int]], limits: list[int], step: int
) -> None:
    asked: list[int] = []

    def bytes_at(tokens: int) -> int:
        asked.append(tokens)
        return max(fixed + each * tokens for fixed, each in lines)

    peak = PeakMemory(bytes_at, step)
    for limit in limits:  # each search begins near where the last one ended
        exact = min((limit - fixed) // each for fixed, each in lines)
        # Between two steps the peak is bounded by a line above it, so lengths that do not fit are never allowed.
        found = peak.most(limit)
        assert found == 0 if exact < step else exact - step < found <= exact
        assert found == PeakMemory(bytes_at, step).most(limit)
        if found:
            assert peak.needs(found // step * step) <= limit
            assert peak.needs(exact + step) > limit
    assert all(tokens % step == 0 for tokens in asked)


def test_each_number_of_tokens_is_asked_for_once() -> None:
    asked: list[int] = []

    def bytes_at(tokens: int) -> int:
        asked.append(tokens)
        return max(3 * 10**9 + 10**6 * tokens, 10**9 + 2 * 10**6 * tokens)

    peak = PeakMemory(bytes_at, 64)
    assert [peak.most(limit) for limit in (9e9, 9e9, 9.1e9, 3.5e9)] == [4000, 4000, 4050, 500]
    assert len(asked) == len(set(asked)) <= 12


def test_what_grows_with_no_token_holds_none() -> None:
    assert PeakMemory(lambda tokens: 10.0, 64).most(100.0) == 0
