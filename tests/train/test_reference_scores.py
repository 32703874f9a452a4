"""Every answer that a run reads is scored once, even if scoring is interrupted or the run becomes longer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydragraph.cluster.launch import apart
from hydragraph.cluster.processes.stop_requests import Stopping
from hydragraph.data.mini_batches import MiniBatches, Mixture
from hydragraph.data.tokenizer import train_bpe
from hydragraph.spec.record import from_record
from hydragraph.train.config import ModelConfig, TrainConfig
from hydragraph.train.reference_scores import ReferenceScores, evaluation_name, model_identity, train_name
from tests.data.written import write_tokens
from tests.train.plain import settings

BYTES = train_bpe(["x"], 257)  # one token per byte


class Executor:
    """Scores an answer as the sum of its ids, and asks to stop after a number of calls."""

    def __init__(self, stopping: Stopping, calls: int = -1) -> None:
        self.stopping, self.calls = stopping, calls
        self.scored: list[int] = []

    def score(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        sums = [int(one.sum()) for one in sequences]
        self.scored += sums
        self.calls -= 1
        if not self.calls:
            self.stopping.signal = 15
        return torch.tensor(sums, dtype=torch.float32)


def stream(folder: Path, name: str, first: str = "a") -> MiniBatches:
    """Ten pairs of answers of different lengths, which no other stream has."""
    texts = [chr(ord(first) + i) * (i + 2) for i in range(20)]
    return MiniBatches(write_tokens(folder / name, texts, BYTES), 60, 30, 0, pairs=True)


def ids(member: MiniBatches, chunk: int) -> torch.Tensor:
    answer = member.read(chunk, with_score=False)
    assert isinstance(answer, torch.Tensor)
    return answer


def config(folder: Path, steps: int) -> TrainConfig:
    return replace(from_record(TrainConfig, settings(folder)), steps=steps, evaluate_batches=1)


def scored(
    path: Path, folder: Path, steps: int, calls: int = -1, model: str = "first"
) -> tuple[ReferenceScores, list[int], int]:
    """Complete the scores of a run; return them, the answers that were scored, and the signal that ended it."""
    reference = ReferenceScores(path, stream(folder, "train"), {"heldout": [stream(folder, "heldout", "A")]}, model)
    stopping = Stopping(30)
    executor: Any = Executor(stopping, calls)
    signal = reference.complete(reference.missing(config(folder, steps)), executor, apart("cpu"), stopping, None)
    return reference, executor.scored, signal


def test_interrupted_scoring_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    whole, everything, _ = scored(tmp_path / "whole.npz", tmp_path, 3)
    _, before, signal = scored(path, tmp_path, 3, calls=2)
    assert signal == 15
    resumed, after, signal = scored(path, tmp_path, 3)
    assert signal == 0
    assert before
    assert after
    assert sorted(before + after) == sorted(everything) == sorted(set(everything))
    for name, scores in whole.of.items():
        np.testing.assert_array_equal(resumed.of[name], scores)
    assert scored(path, tmp_path, 3)[1] == []


def test_a_longer_run_scores_what_it_also_reads(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    _, short, _ = scored(path, tmp_path, 2)
    reference, more, _ = scored(path, tmp_path, 100)
    assert not set(short) & set(more)
    train = reference.of[train_name(0)]
    assert len(train) == 20
    assert not np.isnan(train).any()
    member = stream(tmp_path, "train")
    for chunk, score in enumerate(train):
        assert ids(member, chunk).sum() == score
    assert not np.isnan(reference.of[evaluation_name("heldout", 0)]).all()


def test_scores_of_other_data_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    scored(path, tmp_path, 100)
    other = ReferenceScores(path, stream(tmp_path, "other", "0"), {}, "first")
    other.read()
    assert np.isnan(other.of[train_name(0)]).all()


def test_scores_of_another_model_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "reference.npz"
    first, everything, _ = scored(path, tmp_path, 3)
    joining = ReferenceScores(path, stream(tmp_path, "train"), {}, None)
    joining.read()
    np.testing.assert_array_equal(joining.of[train_name(0)], first.of[train_name(0)])
    assert scored(path, tmp_path, 3, model="second")[1] == everything


def test_a_model_is_known_by_its_settings_and_files(tmp_path: Path) -> None:
    new = config(tmp_path, 3)
    seeded = replace(new, seed=1)
    (tmp_path / "base").mkdir()
    base = replace(new, model=ModelConfig(path=str(tmp_path / "base")))
    bfloat16 = replace(new, dtype="bfloat16")  # whose scores are rounded otherwise
    seen = [model_identity(new), model_identity(seeded), model_identity(bfloat16), model_identity(base)]
    assert model_identity(replace(base, seed=1, steps=9)) == seen[-1]
    for size in (1, 2):
        (tmp_path / "base" / "model.safetensors").write_bytes(bytes(size))
        seen.append(model_identity(base))
    os.utime(tmp_path / "base" / "model.safetensors", (1, 1))
    seen.append(model_identity(base))
    assert len(set(seen)) == 7


def test_answers_of_a_mixture_are_found_in_their_corpus(tmp_path: Path) -> None:
    members = [stream(tmp_path, "first"), stream(tmp_path, "second", "A")]
    reference = ReferenceScores(tmp_path / "reference.npz", Mixture(members, (1.0, 1.0), 60), {}, "first")
    executor: Any = Executor(stopping := Stopping(30))
    reference.complete(reference.missing(config(tmp_path, 40)), executor, apart("cpu"), stopping, None)
    for i, member in enumerate(members):
        sums = [float(ids(member, chunk).sum()) for chunk in range(20)]
        assert reference.of[train_name(i)].tolist() == pytest.approx(sums)


def test_each_corpus_of_a_mixture_is_scored_for_evaluations(tmp_path: Path) -> None:
    held = [stream(tmp_path, "first"), stream(tmp_path, "second", "A")]
    reference = ReferenceScores(tmp_path / "reference.npz", stream(tmp_path, "train", "0"), {"heldout": held}, None)
    scored = {name for answers in reference.missing(config(tmp_path, 1)) for name, _ in answers}
    assert scored == {train_name(0), evaluation_name("heldout", 0), evaluation_name("heldout", 1)}
