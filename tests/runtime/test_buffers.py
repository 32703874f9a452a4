"""Buffers come back only after they were given back, and do not outlive the strategy that needed them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.runtime.buffers import Buffers

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 5, 64]), st.booleans(), st.integers(0, 5)), max_size=40))
def test_no_two_users_share_memory(actions: list[tuple[int, bool, int]]) -> None:
    buffers, held = Buffers(CPU), []
    for elements, half, victim in actions:
        held.append(buffers.take(elements, torch.bfloat16 if half else torch.float32))
        assert held[-1].shape == (elements,)
        assert held[-1].dtype == (torch.bfloat16 if half else torch.float32)
        addresses = [t.data_ptr() for t in held if len(t)]
        assert len(set(addresses)) == len(addresses)
        if victim < len(held) and victim % 2:
            buffers.give(held.pop(victim))
        if victim == 4:
            held.clear()
            buffers.begin()


def test_what_was_given_back_is_handed_out_again_and_unused_buffers_are_dropped() -> None:
    buffers = Buffers(CPU)
    first = buffers.take(8)
    buffers.give(first)
    buffers.begin()
    assert buffers.take(8) is first
    buffers.give(first)
    buffers.begin()
    buffers.begin()  # after an iteration that had no use for it
    assert buffers.take(8) is not first


def test_a_strangers_tensor_is_left_alone() -> None:
    buffers = Buffers(CPU)
    stranger = torch.zeros(8)
    buffers.give(stranger)
    assert buffers.take(8).data_ptr() != stranger.data_ptr()


def test_what_a_failed_iteration_kept_is_not_handed_out_again() -> None:
    buffers = Buffers(CPU)
    lost = buffers.take(8)
    buffers.begin()
    buffers.give(lost)
    assert buffers.take(8).data_ptr() != lost.data_ptr()
