"""Every chunk once per epoch, within the budget, the same stream from the same seed, from any point."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.data.mini_batches import Drawn, MiniBatches, Mixture, Split, cut, split_documents
from hydragraph.data.token_file import EncodedDocument, TokenFile, write_encoded
from hydragraph.data.tokenizer import train_bpe
from tests.data.written import tokens_of, write_tokens

BYTES = train_bpe(["x"], 257)  # one token per byte
Stream = list[list[list[int]]]
Lengths = st.lists(st.integers(1, 40), min_size=1, max_size=20).filter(lambda lengths: max(lengths) >= 2)


@contextmanager
def token_file(lengths: list[int]) -> Iterator[TokenFile]:
    """A file whose documents have these lengths, and whose chunks all differ."""
    with tempfile.TemporaryDirectory() as folder:
        texts = [chr(33 + i) * (length - 1) for i, length in enumerate(lengths)]
        yield write_tokens(Path(folder) / "tokens", texts, BYTES)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    package = Path(json.__file__).parent
    texts = [text for path in sorted(package.glob("*.py")) for text in path.read_text().split("\n\n")]
    return write_tokens(tmp_path_factory.mktemp("data") / "json.tokens", texts, train_bpe(texts, 500))


def plain(batch: list[Drawn]) -> list[list[int]]:
    return [sequence.tolist() for sequence in batch if isinstance(sequence, Tensor)]


def take(batches: MiniBatches, count: int) -> Stream:
    return [plain(next(batches)) for _ in range(count)]


def chunks_of(documents: list[list[int]], max_length: int) -> list[tuple[int, ...]]:
    """The oracle: slice every document, drop what has no target."""
    pieces = [tuple(d[at : at + max_length]) for d in documents for at in range(0, len(d), max_length)]
    return [piece for piece in pieces if len(piece) >= 2]


@settings(max_examples=60)
@given(Lengths, st.integers(2, 12), st.integers(0, 20), st.integers(0, 5))
def test_every_epoch_has_every_chunk_once_within_the_budget(
    lengths: list[int], max_length: int, more: int, seed: int
) -> None:
    with token_file(lengths) as file:
        batches = MiniBatches(file, max_length + more, max_length, seed)
        expected = chunks_of([tokens.tolist() for tokens in tokens_of(file)], max_length)
        assert len(batches.chunks) == len(expected)
        stream: Stream = []
        while sum(map(len, stream)) < 3 * len(expected) + 1:
            stream.append(plain(next(batches)))
            assert batches.lengths == tuple(map(len, stream[-1]))
    flat = [tuple(sequence) for batch in stream for sequence in batch]
    for epoch in range(3):
        assert Counter(flat[epoch * len(expected) : (epoch + 1) * len(expected)]) == Counter(expected)
    for batch, following in pairwise(stream):
        total = sum(map(len, batch))
        assert 0 < total <= max_length + more
        assert total + len(following[0]) > max_length + more


@settings(max_examples=40)
@given(Lengths, st.integers(2, 12), st.integers(0, 20), st.integers(0, 30))
def test_resuming_at_any_point_gives_the_same_stream(
    lengths: list[int], max_length: int, more: int, steps: int
) -> None:
    with token_file(lengths) as file:
        original = MiniBatches(file, max_length + more, max_length, seed=3)
        take(original, steps)
        state = json.loads(json.dumps(original.state_dict()))
        resumed = MiniBatches(file, max_length + more, max_length, seed=3)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert resumed.state_dict() == original.state_dict()
        assert take(resumed, 8) == take(original, 8)


def test_a_state_also_rewinds(file: TokenFile) -> None:
    batches = MiniBatches(file, 512, 128, seed=1)
    take(batches, 5)
    state = batches.state_dict()
    ahead = take(batches, 60)
    assert batches.state_dict()["epoch"] != 0
    batches.load_state_dict(state)
    assert batches.lengths == ()
    assert take(batches, 60) == ahead


def test_the_seed_alone_decides_the_stream(file: TokenFile) -> None:
    streams = [take(MiniBatches(file, 512, 128, seed), 10) for seed in (0, 0, 1, 2**40)]
    assert streams[0] == streams[1]
    assert all(streams[0] != other for other in streams[2:])
    again = MiniBatches(TokenFile.open(file.path), 512, 128, 0)
    assert take(again, 10) == streams[0]


def test_epochs_differ(file: TokenFile) -> None:
    batches = MiniBatches(file, 10**6, 128, seed=0)
    flat = plain(next(batches))
    count = len(batches.chunks)
    assert flat[:count] != flat[count : 2 * count]


def test_the_stream_is_the_same_in_every_process_and_version() -> None:
    with token_file([2, 3, 4, 5, 6, 7, 8, 9]) as file:
        batches = MiniBatches(file, 16, 9, seed=7)
        lengths = [tuple(map(len, batch)) for batch in take(batches, 6)]
    # Recorded once; a change here would silently reorder the data of every run that is resumed.
    assert lengths == [(6, 9), (8, 7), (5, 2, 4, 3), (6, 4, 2), (9, 5), (3, 7)]
    assert split_documents(12, "heldout", 0.25).tolist() == [4, 6, 10]


@given(Lengths, st.integers(2, 12), st.data())
def test_cut_equals_slicing(lengths: list[int], max_length: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True).map(sorted))
    chunks = cut(np.array(lengths, np.int64), np.array(chosen, np.int64), max_length)
    expected = [
        (document, start, min(max_length, lengths[document] - start))
        for document in chosen
        for start in range(0, lengths[document], max_length)
        if lengths[document] - start >= 2
    ]
    columns = (chunks.documents.tolist(), chunks.starts.tolist(), chunks.lengths.tolist())
    assert list(zip(*columns, strict=True)) == expected


@given(st.integers(2, 300), st.floats(0.001, 0.999))
def test_the_splits_share_no_document_and_lose_none(count: int, heldout: float) -> None:
    train = split_documents(count, "train", heldout).tolist()
    held = split_documents(count, "heldout", heldout).tolist()
    assert train
    assert held
    assert sorted(train + held) == list(range(count))
    assert train == sorted(train)
    assert abs(len(held) - heldout * count) <= 1


def test_the_split_does_not_depend_on_the_seed(file: TokenFile) -> None:
    def held(seed: int) -> set[int]:
        return set(MiniBatches(file, 512, 128, seed, "heldout", 0.2).chunks.documents.tolist())

    assert held(0) == held(1)
    train = set(MiniBatches(file, 512, 128, 5, "train", 0.2).chunks.documents.tolist())
    assert not train & held(0)


def test_a_truncated_pass_reads_documents_from_the_whole_file() -> None:
    with token_file([4] * 400) as file:
        first = next(MiniBatches(file, 400, 8, seed=1).single_pass_chunks())
        assert 30 < sum(chunk < 200 for chunk in first) < 70
        assert next(MiniBatches(file, 400, 8, seed=2).single_pass_chunks()) == first


@settings(max_examples=40)
@given(Lengths, st.integers(2, 12), st.integers(0, 20))
def test_a_single_pass_reads_everything_and_leaves_the_stream(lengths: list[int], max_length: int, more: int) -> None:
    with token_file(lengths) as file:
        batches = MiniBatches(file, max_length + more, max_length)
        state = batches.state_dict()
        passes = [[plain(batch) for batch in batches.single_pass()] for _ in range(2)]
        assert batches.state_dict() == state
        assert batches.lengths == ()
        expected = chunks_of([tokens.tolist() for tokens in tokens_of(file)], max_length)
    assert passes[0] == passes[1]
    assert sorted(tuple(sequence) for batch in passes[0] for sequence in batch) == sorted(expected)
    assert all(0 < sum(map(len, batch)) <= max_length + more for batch in passes[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 600), ("max_length", 64), ("seed", 9), ("split", "heldout"), ("heldout", 0.5)],
)
def test_a_state_of_other_settings_is_refused(file: TokenFile, name: str, value: Any) -> None:
    ours: dict[str, Any] = {"tokens": 512, "max_length": 128, "seed": 1, "heldout": 0.25}
    mine, other = MiniBatches(file, **ours), MiniBatches(file, **{**ours, name: value})
    with pytest.raises(ValueError, match=f"{name} is ") as error:
        mine.load_state_dict(other.state_dict())
    assert repr(value) in str(error.value)
    assert repr(mine.state_dict()[name]) in str(error.value)


def test_a_state_of_another_file_is_refused(file: TokenFile) -> None:
    with token_file([5, 6]) as other:
        state = MiniBatches(other, 512, 128).state_dict()
        with pytest.raises(ValueError, match=f"file is '{other.fingerprint}'.*'{file.fingerprint}'"):
            MiniBatches(file, 512, 128).load_state_dict(state)


@pytest.mark.parametrize("change", [{"position": -1}, {"position": 10**9}, {"epoch": -1}])
def test_a_state_out_of_range_is_refused_and_changes_nothing(file: TokenFile, change: dict[str, Any]) -> None:
    batches = MiniBatches(file, 512, 128)
    before = batches.state_dict()
    with pytest.raises(ValueError, match=r"load a result of state_dict\(\)"):
        batches.load_state_dict({**before, **change})
    assert batches.state_dict() == before


def test_a_file_without_targets_is_refused() -> None:
    with token_file([1, 1]) as file, pytest.raises(ValueError, match="no train document has at least two tokens"):
        MiniBatches(file, 8, 8)
    split: Split = "train"
    with pytest.raises(ValueError, match=r"heldout 0.1 needs 2 documents, but there is only 1: give more"):
        split_documents(1, split, 0.1)


def test_of_a_single_document_the_last_pieces_are_held_out() -> None:
    with token_file([1000]) as file:
        train = MiniBatches(file, 64, 64, heldout=0.1)
        held = MiniBatches(file, 64, 64, split="heldout", heldout=0.1)
        starts = [*train.chunks.starts.tolist(), *held.chunks.starts.tolist()]
        assert starts == list(range(0, 1000, 64))
        assert len(held.chunks) == 2
    with (
        token_file([60]) as file,
        pytest.raises(ValueError, match="needs 2 pieces of max_length tokens, but the only document has 1: give"),
    ):
        MiniBatches(file, 64, 64, heldout=0.1)


def test_sequences_are_the_documents_themselves(file: TokenFile) -> None:
    longest = int(file.lengths.max())
    batches = MiniBatches(file, 2 * longest, longest)
    drawn = Counter(tuple(s) for batch in batches.single_pass() for s in plain(batch))
    assert drawn == Counter(tuple(tokens.tolist()) for tokens in tokens_of(file) if len(tokens) >= 2)
    assert all(s.dtype == torch.int64 and s.dim() == 1 for s in next(batches))


def targeted(folder: Path, documents: list[tuple[list[int], list[bool]]]) -> TokenFile:
    encoded = [[EncodedDocument(ids, targets)] for ids, targets in documents]
    return write_encoded(folder / "targeted", encoded, 40_000, 1, True)


def test_tokens_that_are_no_targets_have_no_label(tmp_path: Path) -> None:
    file = targeted(tmp_path, [([7, 39_999, 8], [False, True, False]), ([5, 6], [True, True])])
    assert file.targeted
    assert file.path.stat().st_size == 128 + 24 + 3 * 8, "ids of 16 bits leave no room for the mark"
    batches = MiniBatches(file, 8, 8)
    drawn = [batches.read(chunk) for chunk in range(2)]
    found = [{name: value.tolist() for name, value in one.items()} for one in drawn if isinstance(one, dict)]
    assert found == [
        {"input_ids": [7, 39_999, 8], "labels": [-100, 39_999, -100]},
        {"input_ids": [5, 6], "labels": [5, 6]},
    ]


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=30), min_size=1, max_size=8)


@given(masks, st.integers(2, 9))
def test_pieces_without_a_target_are_left_out(targets: list[list[bool]], max_length: int) -> None:
    expected = [
        (document, start)
        for document, mask in enumerate(targets)
        for start in range(0, len(mask), max_length)
        if any(mask[start + 1 : start + max_length])  # the first token of a piece is predicted by none
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = targeted(Path(folder), [([2] * len(mask), mask) for mask in targets])
        if not expected:
            with pytest.raises(ValueError, match="no train document has at least two tokens"):
                MiniBatches(file, 9, max_length)
            return
        chunks = MiniBatches(file, 9, max_length).chunks
    assert list(zip(chunks.documents.tolist(), chunks.starts.tolist(), strict=True)) == expected


def test_documents_that_are_too_long_are_cut_or_dropped() -> None:
    with token_file([3, 9, 4, 5]) as file:
        assert MiniBatches(file, 8, 4, overlong="drop").chunks.documents.tolist() == [0, 2]
        assert MiniBatches(file, 8, 4).chunks.documents.tolist() == [0, 1, 1, 2, 3]
        with pytest.raises(
            ValueError, match=r"no train document has at least two tokens and at most 2 tokens: raise data.max_length"
        ):
            MiniBatches(file, 8, 2, overlong="drop")
        with pytest.raises(ValueError, match="saved overlong is 'cut', but this stream's is 'drop'"):
            MiniBatches(file, 8, 4, overlong="drop").load_state_dict(MiniBatches(file, 8, 4).state_dict())


def test_a_single_document_is_dropped_if_too_long_and_its_pieces_without_targets_are_left_out(tmp_path: Path) -> None:
    with (
        token_file([1000]) as file,
        pytest.raises(ValueError, match=r"no train document .* at most 64 tokens: raise data.max_length"),
    ):
        MiniBatches(file, 64, 64, heldout=0.1, overlong="drop")
    file = targeted(tmp_path, [([2] * 40, [False] * 20 + [True] * 20)])
    assert MiniBatches(file, 8, 4, heldout=0.5).chunks.starts.tolist() == [20, 24, 28]
    held = MiniBatches(file, 8, 4, split="heldout", heldout=0.5)
    assert held.chunks.starts.tolist() == [32, 36]


def test_skipping_is_drawing_without_reading(file: TokenFile) -> None:
    one, two = MiniBatches(file, 512, 128), MiniBatches(file, 512, 128)
    for _ in range(4):
        assert one.skip() == tuple(map(len, next(two)))
        assert one.state_dict() == two.state_dict()


@contextmanager
def answers(targets: list[tuple[int, int]], prompt: int = 3) -> Iterator[TokenFile]:
    """A file of pairs, whose answers have these lengths and follow a prompt; the id of a token is its pair."""
    with tempfile.TemporaryDirectory() as folder:
        documents = [
            EncodedDocument([pair] * (prompt + length), [False] * prompt + [True] * length)
            for pair, lengths in enumerate(targets)
            for length in lengths
        ]
        yield write_encoded(Path(folder) / "tokens", [documents], 100, 99, True)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=12),
    overlong=st.sampled_from(["cut", "drop"]),
    room=st.integers(0, 30),
)
def test_the_answers_of_a_pair_stay_together(lengths: list[tuple[int, int]], overlong: str, room: int) -> None:
    most = 12
    with answers(lengths) as file:
        kept = [i for i, pair in enumerate(lengths) if overlong == "cut" or max(pair) + 3 <= most]
        if not kept:
            return
        batches = MiniBatches(file, 2 * most + room, most, overlong=overlong, pairs=True)
        seen: list[int] = []
        while batches.state_dict()["epoch"] == 0 or not seen:
            batch: list[Any] = next(batches)
            assert sum(len(one["input_ids"]) for one in batch) == sum(batches.lengths) <= 2 * most + room
            for place, (chosen, rejected) in enumerate(zip(batch[::2], batch[1::2], strict=True)):
                pair = int(chosen["input_ids"][0])
                first, second = (chunk for _, chunk in batches.drawn[2 * place : 2 * place + 2])
                assert first % 2 == 0
                assert first + 1 == second
                for one, length in zip((chosen, rejected), lengths[pair], strict=True):
                    assert one["input_ids"].tolist() == [pair] * min(length + 3, most)
                    assert int((one["labels"] != -100).sum()) == min(length, most - 3)
                seen.append(pair)
        assert sorted(seen[: len(kept)]) == kept
        once = [int(one["input_ids"][0]) for batch in batches.single_pass() for one in batch]
        assert once[::2] == once[1::2]
        assert sorted(once[::2]) == kept


def test_pairs_are_held_out_and_left_out_whole() -> None:
    needs = "0.3 needs 2 pairs, but there is only 1: give more pairs, or set data.heldout to 0, and name other texts in"
    with answers([(1, 1)]) as file, pytest.raises(ValueError, match=needs):
        MiniBatches(file, 8, 4, heldout=0.3, pairs=True)
    with answers([(1, 1)] * 10) as file:
        parts = [MiniBatches(file, 8, 4, split=split, heldout=0.3, pairs=True) for split in ("train", "heldout")]
        pairs = [{int(tokens_of(file)[int(i)][0]) for i in part.chunks.documents} for part in parts]
        assert [len(part.chunks) for part in parts] == [14, 6]
        assert not pairs[0] & pairs[1]
        with pytest.raises(ValueError, match="no train pair has two answers with targets"):
            MiniBatches(file, 6, 3, pairs=True)  # the prompt alone


def test_scores_come_with_the_sequences() -> None:
    with answers([(1, 2), (3, 4)]) as file:
        batches = MiniBatches(file, 100, 10, pairs=True)
        batches.scores = np.arange(4, dtype=np.float32)
        batch: list[Any] = next(batches)
        assert [float(one["reference"]) for one in batch] == [float(chunk) for _, chunk in batches.drawn]
        assert "reference" not in batches.read(0, with_score=False)
        before = batches.state_dict()
        with pytest.raises(ValueError, match="saved pairs is True, but this stream's is False"):
            MiniBatches(file, 100, 10).load_state_dict(before)


MOST, BUDGET = 8, 24


def members(files: list[TokenFile]) -> list[MiniBatches]:
    return [MiniBatches(file, BUDGET, MOST, seed=i) for i, file in enumerate(files)]


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
            assert abs(drawn[i] - sum(drawn) * weights[i] / sum(weights)) <= MOST
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
