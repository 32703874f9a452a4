"""Endless streams of mini-batches that fill a token budget, from one or several weighted corpora."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydragraph.data.token_file import TokenFile

Split = Literal["train", "heldout"]
_Indices = npt.NDArray[np.int64]
# ignore_index of PyTorch
IGNORED = -100
# Key for `_shuffle`, independent of the run's seed
_SPLIT_KEY = (0, 0)
_EPOCH_STREAM = 1
# A run that evaluates needs other texts if it holds none out
_EVALUATE_ELSEWHERE = "set data.heldout to 0, and name other texts in data.evaluation or omit evaluate_every"
_CONFIG_FIELDS = {
    "file": "data",
    "tokens": "data.tokens_per_step",
    "max_length": "data.max_length",
    "heldout": "data.heldout",
    "overlong": "data.overlong",
    "pairs": "objective",
}


@dataclass(frozen=True, eq=False)
class Chunks:
    """Pieces of documents, in file order, as int64 arrays.

    Attributes:
        starts: index of each piece's first token in its document.
        lengths: tokens of each piece, at least 2.
    """

    documents: _Indices
    starts: _Indices
    lengths: _Indices

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, chosen: slice | npt.NDArray[np.bool_]) -> Chunks:
        return Chunks(self.documents[chosen], self.starts[chosen], self.lengths[chosen])


def cut(lengths: _Indices, documents: _Indices, max_length: int) -> Chunks:
    """Split documents into chunks of 2 to `max_length` tokens."""
    # lengths 10, 4, 9 and max_length 4: counts 3, 1, 2; starts 0, 4, 8, 0, 0, 4; pieces 4, 4, 2, 4,
    # 4, 4. The third document's last token would be a chunk without a target, and is left out.
    totals = lengths[documents]
    counts = totals // max_length + (totals % max_length >= 2)
    first = np.cumsum(counts) - counts
    starts = (np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)) * max_length
    pieces = np.minimum(np.repeat(totals, counts) - starts, max_length)
    return Chunks(np.repeat(documents, counts), starts, pieces)


def split_pieces(chunks: Chunks, split: Split, heldout: float) -> Chunks:
    """Return a split's pieces of one document; the last pieces are held out."""
    count = len(chunks)
    if count < 2:
        raise ValueError(
            f"heldout {heldout} needs 2 pieces of max_length tokens, but the only document has {count}: give more "
            f"text, or {_EVALUATE_ELSEWHERE}"
        )
    at = count - min(max(round(heldout * count), 1), count - 1)
    return chunks[at:] if split == "heldout" else chunks[:at]


def split_documents(count: int, split: Split, heldout: float, unit: str = "documents") -> _Indices:
    """Return a split's sorted document indices; the last documents of a fixed shuffle are held out.

    Args:
        heldout: fraction to hold out; if above 0, both splits get at least one document.
        unit: what the error calls the documents.
    """
    if heldout and count < 2:
        raise ValueError(
            f"heldout {heldout} needs 2 {unit}, but there is only {count}: give more {unit}, or {_EVALUATE_ELSEWHERE}"
        )
    heldout_count = min(max(round(heldout * count), 1), count - 1) if heldout else 0
    order = _shuffle(count, *_SPLIT_KEY)
    return np.sort(order[count - heldout_count :] if split == "heldout" else order[: count - heldout_count])


# Sequence: token ids, or a mapping with ids and labels.
Drawn = Tensor | dict[str, Tensor]


class Mixture(Iterator[list[Drawn]]):
    """Endless mini-batches in which each corpus's share of the tokens matches its weight, to within one sequence.

    Each sequence comes from the corpus with the fewest tokens so far, relative to its weight. A mini-batch ends when
    the next sequence would exceed the budget.

    Args:
        members: streams of the corpora, whose token budgets `tokens` replaces.

    Attributes:
        lengths, drawn: tokens and (member, chunk) of each sequence of the last mini-batch.
    """

    def __init__(self, members: Sequence[MiniBatches], weights: Sequence[float], tokens: int) -> None:
        self.members = tuple(members)
        self.lengths: tuple[int, ...] = ()
        self.drawn: tuple[tuple[int, int], ...] = ()
        self._weights = tuple(map(float, weights))
        self._tokens_of = [0] * len(members)
        self._budget = tokens

    def __next__(self) -> list[Drawn]:
        """Return the next mini-batch: sequences int64 [length], with labels unless all tokens are targets."""
        self.skip()
        return [self.members[i].read(chunk) for i, chunk in self.drawn]

    def skip(self) -> tuple[int, ...]:
        drawn: list[tuple[int, int]] = []
        lengths: list[int] = []
        room = self._budget
        while True:
            # The corpus furthest behind its weight; the lower index wins ties. Only counts matter,
            # so a saved state resumes the same stream.
            i = min(range(len(self.members)), key=lambda i: (self._tokens_of[i] / self._weights[i], i))
            following = self.members[i].next_lengths
            if sum(following) > room:
                break
            drawn += [(i, chunk) for chunk in self.members[i].take()]
            lengths += following
            room -= sum(following)
            self._tokens_of[i] += sum(following)
        self.lengths = tuple(lengths)
        self.drawn = tuple(drawn)
        return self.lengths

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)

    def state_dict(self) -> dict[str, Any]:
        states = [member.state_dict() for member in self.members]
        return {"weights": list(self._weights), "drawn": list(self._tokens_of), "members": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; raise a ValueError if data or settings differ."""
        weights = state.get("weights")
        if weights != list(self._weights):
            raise ValueError(
                f"mini-batch state: saved weights are {weights}, but this mixture's are {list(self._weights)}: "
                "resume with the same data.mixture, or start a new run"
            )
        for member, own in zip(self.members, state["members"], strict=True):
            member.load_state_dict(own)
        self._tokens_of = [int(count) for count in state["drawn"]]
        self.lengths = ()


class MiniBatches(Mixture):
    """Endless mini-batches of one corpus. Each epoch returns every chunk once, in an order drawn from (seed, epoch).

    A mini-batch may contain chunks of two epochs. The stream depends only on the file and the arguments.

    Args:
        tokens: token budget of a mini-batch, at least the length of any chunk or pair.
        heldout: fraction of documents to hold out, or of a single document's chunks.
        overlong: "cut" or "drop" documents longer than `max_length`.
        pairs: whether documents 2i and 2i + 1 are a pair of answers, which share a mini-batch. If an answer is too
            long, "cut" keeps its first `max_length` tokens, and "drop" skips the pair.

    Attributes:
        chunks: chunks of one epoch; a pair's answers are adjacent.
        scores: each chunk's reference score, which its sequence contains as "reference"; None: no scores.

    Raises:
        ValueError: the split has no document of at least two tokens.
    """

    def __init__(
        self,
        file: TokenFile,
        tokens: int,
        max_length: int,
        seed: int = 0,
        split: Split = "train",
        heldout: float = 0.0,
        overlong: str = "cut",
        pairs: bool = False,
    ) -> None:
        self._together = 2 if pairs else 1
        if pairs:
            chosen = split_documents(len(file) // 2, split, heldout, "pairs")
            self.chunks = _pairs(file, max_length, overlong, chosen)
        else:
            by_piece = len(file) == 1 and heldout > 0
            documents = np.zeros(1, np.int64) if by_piece else split_documents(len(file), split, heldout)
            if overlong == "drop":
                documents = documents[file.lengths[documents] <= max_length]
            chunks = cut(file.lengths, documents, max_length)
            chunks = chunks[file.counts(chunks.documents, chunks.starts, chunks.lengths) > 0]
            self.chunks = split_pieces(chunks, split, heldout) if by_piece and len(chunks) else chunks
        if not len(self.chunks):
            short = f" and at most {max_length} tokens" if overlong == "drop" else ""
            what = "pair has two answers with targets" if pairs else "document has at least two tokens"
            remedy = "give a corpus with longer texts"
            if overlong == "drop" and len(file):
                shortest = int(file.lengths.min())
                remedy = f"raise data.max_length (the shortest has {shortest} tokens), or set data.overlong to 'cut'"
            raise ValueError(f"{file.path}: no {split} {what}{short}: {remedy}")
        super().__init__((self,), (1.0,), tokens)
        self.scores: npt.NDArray[np.float32] | None = None
        self._file = file
        self._settings: dict[str, int | float | str] = {
            "file": file.fingerprint,
            "tokens": tokens,
            "max_length": max_length,
            "seed": seed,
            "split": split,
            "heldout": heldout,
            "overlong": overlong,
            "pairs": pairs,
        }
        self._seed = seed
        self._epoch = self._position = 0
        self._order = self._epoch_order(0)

    def single_pass(self) -> Iterator[list[Drawn]]:
        """Yield mini-batches with every chunk once, in random order, without advancing the endless stream."""
        return ([self.read(chunk) for chunk in chunks] for chunks in self.single_pass_chunks())

    def single_pass_chunks(self) -> Iterator[list[int]]:
        chosen: list[int] = []
        room = self._budget
        # units: [units, chunks per unit]; a unit is a chunk or a pair of answers
        units = self.chunks.lengths.reshape(-1, self._together)
        for unit in _shuffle(len(units), *_SPLIT_KEY).tolist():
            length = int(units[unit].sum())
            if length > room:
                yield chosen
                chosen = []
                room = self._budget
            chosen += self._unit(unit)
            room -= length
        yield chosen

    @property
    def tokens(self) -> int:
        return int(self.chunks.lengths.sum())

    @property
    def next_lengths(self) -> list[int]:
        return [int(self.chunks.lengths[chunk]) for chunk in self._unit(int(self._order[self._position]))]

    def take(self) -> list[int]:
        unit = int(self._order[self._position])
        self._position += 1
        if self._position == len(self._order):
            # Draw the next epoch's order now: `next_lengths` looks ahead.
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order(self._epoch)
        return self._unit(unit)

    def _unit(self, unit: int) -> list[int]:
        return list(range(unit * self._together, (unit + 1) * self._together))

    def read(self, chunk: int, with_score: bool = True) -> Drawn:
        document = int(self.chunks.documents[chunk])
        start = int(self.chunks.starts[chunk])
        stop = start + int(self.chunks.lengths[chunk])
        ids = self._file.slice(document, start, stop)
        scores = self.scores if with_score else None
        if not self._file.targeted and scores is None:
            return ids
        labels = ids.where(self._file.targets(document, start, stop), IGNORED)
        reference = {} if scores is None else {"reference": torch.tensor(scores[chunk])}
        return {"input_ids": ids, "labels": labels, **reference}

    @property
    def identity(self) -> str:
        return json.dumps({n: value for n, value in self._settings.items() if n not in ("tokens", "seed")})

    def state_dict(self) -> dict[str, int | float | str]:
        return {**self._settings, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._settings.items():
            # Missing in earlier versions.
            theirs = state.get(name, {"overlong": "cut", "pairs": False}.get(name))
            if theirs != mine:
                raise ValueError(
                    f"mini-batch state: saved {name} is {theirs!r}, but this stream's is {mine!r}: "
                    f"resume with the same {_CONFIG_FIELDS.get(name, name)}, or start a new run"
                )
        epoch = state["epoch"]
        position = state["position"]
        if epoch < 0 or not 0 <= position < len(self._order):
            place = f"epoch {epoch} must be 0 or more, and position {position} from 0 to {len(self._order) - 1}"
            raise ValueError(f"mini-batch state: {place}: load a result of state_dict()")
        if epoch != self._epoch:
            self._order = self._epoch_order(epoch)
        self._epoch = epoch
        self._position = position
        self.lengths = ()

    def _epoch_order(self, epoch: int) -> _Indices:
        return _shuffle(len(self.chunks) // self._together, _EPOCH_STREAM, self._seed, epoch)


def _pairs(file: TokenFile, max_length: int, overlong: str, pairs: _Indices) -> Chunks:
    # pairs 0, 3 -> documents 0, 1, 6, 7; a pair is left out if an answer has no target
    documents = np.stack([2 * pairs, 2 * pairs + 1], 1).ravel()
    whole = file.lengths[documents]
    lengths = np.minimum(whole, max_length)
    starts = np.zeros_like(documents)
    usable = file.counts(documents, starts, lengths) > 0
    if overlong == "drop":
        usable &= whole <= max_length
    return Chunks(documents, starts, lengths)[np.repeat(usable.reshape(-1, 2).all(1), 2)]


def _shuffle(count: int, *key: int) -> _Indices:
    """Return a permutation of range(count) that depends only on the key.

    NumPy's versions may differ in `permutation`, but not in a bit generator's stream (NEP 19).
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(count)
    return np.argsort(bits, kind="stable")
