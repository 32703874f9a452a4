"""Published constants of memory: where it ends, and what is refused."""

from __future__ import annotations

import copy

import pytest

from hydragraph.cost.measured_profile import Profile
from tests.planner.examples import ENTRY, PROFILE


@pytest.mark.parametrize(("scheme", "devices"), [((2, 1), 8), ((2, 4), 64), ((8, 2), 1024)])
def test_max_len_is_where_memory_ends(scheme: tuple[int, int], devices: int) -> None:
    tp, pp = scheme
    model, memory = ENTRY["model"], ENTRY["memory"]
    hidden, layers, vocab = model["hidden"], model["layers"], model["vocab"]

    def used(tokens: int) -> float:
        activations = layers * (tokens * hidden / tp) * memory["activation_A"][str(tp)]
        states = (layers * hidden**2 / devices) * 210 * 0.75 + (layers / pp) * (hidden**2 / tp) * 210 * 0.25
        e = 32 if pp == 1 else 16
        embeddings = hidden * vocab / devices * e * 0.75 + hidden * vocab / tp * e * 0.25
        return activations + states + embeddings + 5e9 + 6e9

    longest = PROFILE.max_len(scheme, devices)
    assert used(longest) <= 85e9 < used(longest + 1)


def test_more_devices_never_shorten_a_micro_batch() -> None:
    found = [PROFILE.max_len((2, 2), n) for n in (4, 8, 64, 1024)]
    assert found == sorted(found)


def test_where_nothing_fits_max_len_is_zero() -> None:
    entry = copy.deepcopy(ENTRY)
    entry["memory"]["device_bytes"] = 1e9
    assert Profile.from_constants(entry).max_len((1, 1), 1) == 0
