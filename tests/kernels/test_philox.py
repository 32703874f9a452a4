"""Philox: published answers, and independence of what else is drawn."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.kernels import philox

# The known answers of Random123 for philox4x32-10: counter, key, result.
ANSWERS = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def signed(high: int, low: int) -> int:
    value = high << 32 | low
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS)
def test_words_are_the_published_ones(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]) -> None:
    keys = torch.tensor([[signed(key[1], key[0]), signed(counter[2], counter[1])]])
    features = 4 * counter[0] + torch.arange(4)
    assert philox.words(keys, features, counter[3]).tolist() == [list(answer)]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.randoms(use_true_random=False))
def test_any_part_of_the_rows_and_features_has_the_words_of_the_whole(tokens: int, features: int, draw: object) -> None:
    keys = philox.keys_of(philox.key_of(3, 7), [tokens, 2], [5, 0])[0]
    whole = philox.words(keys, torch.arange(features), 9)
    rows = torch.tensor(sorted(draw.sample(range(tokens + 2), (tokens + 2) // 2)), dtype=torch.int64)
    columns = torch.tensor(sorted(draw.sample(range(features), (features + 1) // 2)))
    assert torch.equal(philox.words(keys[rows], columns, 9), whole[rows][:, columns])


def test_keys_number_the_tokens_of_each_sequence() -> None:
    keys = philox.keys_of(8, [2, 1, 2], [0, 3, -1])
    assert keys[0].tolist() == [[8, 0], [8, 1], [8, 3 << 32], [8, -1], [8, -1]]


def test_seeds_and_steps_have_keys_of_their_own() -> None:
    keys = {philox.key_of(seed, step) for seed in (0, 1, 2**31, 2**40, 2**63) for step in range(5)}
    assert len(keys) == 25
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_too_many_calls_are_refused() -> None:
    assert philox.call_word(3, 2) == 3 << 16 | 2
    with pytest.raises(ValueError, match="at most 65536 blocks of 65536 calls"):
        philox.call_word(0, 1 << 16)
