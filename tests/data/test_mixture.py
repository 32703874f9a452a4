"""Every corpus has its part of the tokens at any time, and the stream resumes from any point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.data.mini_batches import Drawn, MiniBatches
from hydragraph.data.mixture import Mixture
from hydragraph.data.token_file import TokenFile
from tests.data.test_mini_batches import Lengths, token_file
from tests.data.written import tokens_of

MAX, BUDGET = 8, 24


def members(files: list[TokenFile]) -> list[MiniBatches]:
    return [MiniBatches(file, BUDGET, MAX, seed=i) for i, file in enumerate(files)]


def plain(batch: list[Drawn]) -> list[list[int]]:
    return [sequence.tolist() for sequence in batch if isinstance(sequence, Tensor)]


@given(Lengths, Lengths, st.tuples(st.floats(0.1, 9), st.floats(0.1, 9)), st.integers(1, 12))
def test_parts_are_right_to_within_a_sequence_and_streams_resume(
    one: list[int], two: list[int], weights: tuple[float, float], steps: int
) -> None:
    with token_file(one) as first, token_file(two) as second:
        mixture = Mixture(members([first, second]), weights, BUDGET)
        for _ in range(steps):
            batch = next(mixture)
            assert 0 < sum(map(len, batch)) <= BUDGET
            assert mixture.lengths == tuple(map(len, batch))
        state = json.loads(json.dumps(mixture.state_dict()))
        drawn = state["drawn"]
        for i in (0, 1):
            assert abs(drawn[i] - sum(drawn) * weights[i] / sum(weights)) <= MAX
        resumed = Mixture(members([first, second]), weights, BUDGET)
        resumed.load_state_dict(state)
        for _ in range(4):
            assert plain(next(resumed)) == plain(next(mixture))
        assert resumed.skip() == mixture.skip()
        assert mixture.tokens == sum(member.tokens for member in mixture.members)


def test_each_corpus_has_its_own_order_and_a_pass_reads_all_once() -> None:
    with token_file([5, 6, 7]) as first, token_file([4, 8]) as second:
        mixture = Mixture(members([first, second]), [1, 1], BUDGET)
        before = mixture.state_dict()
        read = [sequence for member in mixture.members for batch in member.single_pass() for sequence in plain(batch)]
        assert read == [tokens.tolist() for file in (first, second) for tokens in tokens_of(file)]
        assert mixture.state_dict() == before


def test_what_is_of_another_mixture_is_refused(tmp_path: Path) -> None:
    with token_file([5, 6, 7]) as first, token_file([4, 8]) as second:
        mixture = Mixture(members([first, second]), [2, 1], BUDGET)
        with pytest.raises(ValueError, match=r"saved weights are \[1.0, 1.0\], but this mixture's are \[2.0, 1.0\]"):
            mixture.load_state_dict(Mixture(members([first, second]), [1, 1], BUDGET).state_dict())
        with pytest.raises(ValueError, match="file is"):
            mixture.load_state_dict(Mixture(members([second, first]), [2, 1], BUDGET).state_dict())
        with pytest.raises(ValueError, match="saved weights are None"):
            mixture.load_state_dict(members([first])[0].state_dict())
