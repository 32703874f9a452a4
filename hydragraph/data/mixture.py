"""Mini-batches from several weighted corpora."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydragraph.data.mini_batches import Drawn, MiniBatches


class Mixture(Iterator[list[Drawn]]):
    """Endless mini-batches in which each corpus's share of the tokens matches its weight, to within one sequence.

    Each sequence is taken from the corpus with the fewest tokens so far, relative to the corpus's weight.

    Args:
        members: streams of the corpora, whose token budgets `tokens` replaces.
    """

    def __init__(self, members: Sequence[MiniBatches], weights: Sequence[float], tokens: int) -> None:
        self.members = tuple(members)
        self.lengths: tuple[int, ...] = ()
        self.drawn: tuple[tuple[int, int], ...] = ()
        self._weights = tuple(map(float, weights))
        self._drawn = [0] * len(members)
        self._budget = tokens

    def __next__(self) -> list[Drawn]:
        return [self.members[i].read(chunk) for i, chunk in self._fill()]

    def skip(self) -> tuple[int, ...]:
        self._fill()
        return self.lengths

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)

    def state_dict(self) -> dict[str, Any]:
        states = [member.state_dict() for member in self.members]
        return {"weights": list(self._weights), "drawn": list(self._drawn), "members": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`. Raise a ValueError if corpora, weights or settings differ."""
        weights = state.get("weights")
        if weights != list(self._weights):
            raise ValueError(
                f"mini-batch state: saved weights are {weights}, but this mixture's are {list(self._weights)}: "
                "resume with the same data.mixture, or start a new run"
            )
        for member, own in zip(self.members, state["members"], strict=True):
            member.load_state_dict(own)
        self._drawn = [int(count) for count in state["drawn"]]
        self.lengths = ()

    def _fill(self) -> list[tuple[int, int]]:
        chosen: list[tuple[int, int]] = []
        lengths: list[int] = []
        room = self._budget
        while True:
            i = min(range(len(self.members)), key=lambda i: (self._drawn[i] / self._weights[i], i))
            following = self.members[i].next_lengths
            if sum(following) > room:
                self.lengths = tuple(lengths)
                self.drawn = tuple(chosen)
                return chosen
            chosen += [(i, chunk) for chunk in self.members[i].take()]
            lengths += following
            self._drawn[i] += sum(following)
            room -= sum(following)
