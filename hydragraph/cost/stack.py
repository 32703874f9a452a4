"""How a runtime moves data: hydragraph's own way, and that of others, whose measured runs costs can be held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stack:
    """A runtime.

    Attributes:
        parts: each tensor-parallel rank sends its part of a hidden state, and the receivers put them together, as
            DeepSpeed's pipeline engine does; else each receiver gets it whole.
        blocking: a message holds up the stage that sends it; else it travels while that computes.
        all_reduce: gradients are all-reduced over the replicas of a stage, and every replica updates all of its
            weights, after the last backward; else home shards own them (pull and push).
    """

    parts: bool = False
    blocking: bool = False
    all_reduce: bool = False

    @property
    def own(self) -> bool:
        """Whether it is hydragraph's."""
        return self == Stack()


DEEPSPEED = Stack(parts=True, blocking=True, all_reduce=True)
