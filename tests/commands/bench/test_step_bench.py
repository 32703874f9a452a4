"""The sides of a step compute the same; how batches are padded; how targets are judged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.commands.bench.bench_models import SHAPES, LlamaShape, draw_sequences, mixed_lengths
from hydragraph.commands.bench.eager_baselines import baselines, packed_batches, padded_batches
from hydragraph.commands.bench.step_bench import (
    SideResult,
    StepSettings,
    bench_step,
    check_same,
    compile_ours,
    predicted_seconds,
    step_targets,
)
from hydragraph.spec.known_devices import KNOWN
from hydragraph.spec.strategy import Strategy

CPU = torch.device("cpu")
SHAPE = LlamaShape(hidden=32, intermediate=48, layers=1, heads=2, kv_heads=1, vocabulary=60)
STRATEGY = Strategy.parse("<tp1,pp1>", 1)


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(2, 100))
def test_padded_batches_hold_every_sequence_once(lengths: list[int], most: int) -> None:
    sequences = draw_sequences(lengths, 50, 0)
    found: list[list[int]] = []
    for batch in padded_batches(sequences, CPU, most):
        rows, longest = batch["input_ids"].shape
        assert rows == 1 or rows * longest <= most
        assert int(batch["attention_mask"].sum(1).max()) == longest
        for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
            length = int(mask.sum())
            found.append(ids[:length].tolist())
            assert labels[: length - 1].tolist() == ids[1:length].tolist()
            assert bool((labels[length - 1 :] == -100).all())
    assert sorted(found) == sorted(s.tolist() for s in sequences)


def test_padded_and_packed_sides_have_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    model = SHAPE.build(CPU)
    found = baselines(model, lambda: SHAPE.build(CPU), STRATEGY, CPU, torch.float32, compiled=False)
    sequences = draw_sequences([5, 9, 2, 9], 60, 0)
    values = {name: side.checked(sequences) for name, side in found.items()}
    check_same(values, 1e-5)
    assert all(p.grad is None for p in model.parameters())
    assert found["eager, packed"].step(sequences) == pytest.approx(values["eager, padded"][0], rel=1e-5)
    after = {name: side.checked(sequences) for name, side in found.items()}  # they share their weights
    check_same(after, 1e-5)
    assert after["eager, padded"][0] < values["eager, padded"][0]


def test_sides_in_bf16_agree_too() -> None:
    torch.manual_seed(0)
    model = SHAPE.build(CPU)
    found = baselines(model, lambda: SHAPE.build(CPU), STRATEGY, CPU, torch.bfloat16, compiled=False)
    values = {name: side.checked(draw_sequences([5, 9, 2, 9], 60, 0)) for name, side in found.items()}
    check_same(values, 2e-2)
    exact = baselines(model, lambda: SHAPE.build(CPU), STRATEGY, CPU, torch.float32, compiled=False)
    assert values["eager, packed"] != exact["eager, packed"].checked(draw_sequences([5, 9, 2, 9], 60, 0))


def test_packed_batches_are_those_of_the_strategy() -> None:
    (batch,) = packed_batches(draw_sequences([5, 9], 50, 0), STRATEGY, CPU)
    assert batch["cu_seqlens"].tolist() == [0, 9, 14]


def test_a_side_that_differs_is_named() -> None:
    check_same({"hydragraph": (2.0, 1.0), "eager, packed": (2.00001, 1.0)}, 1e-4)
    with pytest.raises(
        ValueError, match=r"hydragraph: gradient norm is 1\.1, but 1 for the " "eager model on packed batches"
    ):
        check_same({"hydragraph": (2.0, 1.1), "eager, packed": (2.0, 1.0)}, 1e-4)
    with pytest.raises(ValueError, match="loss is nan"):
        check_same({"hydragraph": (float("nan"), 1.0), "eager, packed": (2.0, 1.0)}, 1e-4)


def test_a_run() -> None:
    told: list[str] = []
    report = bench_step(StepSettings(SHAPE, 64, 32, 1, CPU, compiled=False, shortest=2), told.append)
    assert [row[0] for row in report.rows] == ["hydragraph", "eager, padded", "eager, packed"]
    losses = {f"{row[6]:.4f} {row[7]:.3f}" for row in report.rows}
    assert len(losses) == 1
    assert {target.verdict for target in report.targets} == {"not measured"}
    assert "one rank, 0.0116 M parameters, 64 tokens" in report.title
    assert any("torch.compile was not measured" in note for note in report.notes)


def test_an_unknown_backend_is_refused() -> None:
    settings = StepSettings(SHAPE, 64, 32, 1, CPU, compiled=False, backend="abacus")
    with pytest.raises(ValueError, match="abacus"):
        compile_ours(SHAPE.build(CPU), STRATEGY, settings).close()


def test_targets() -> None:
    flops = 0.45 * 989e12 * 0.4
    found = {"hydragraph": SideResult(0.4, 0, 0, 0), "compiled, packed": SideResult(0.38, 0, 0, 0)}
    judged = [(t.found, t.verdict) for t in step_targets(found, flops * 1.001, 2.5)]
    assert judged == [("0.95x", "MISSED"), ("45.0 %", "met"), ("2.50 %", "MISSED")]
    assert {t.met for t in step_targets({}, 0, None)} == {None}
    assert SHAPES["1b"].layers == 16


def test_a_step_is_predicted_from_a_datasheet() -> None:
    program = hg.capture(SHAPES["1b"].build("meta"), dtype=torch.bfloat16, check="off")
    strategy = Strategy.parse("<tp1,pp1>", 16)
    lengths = mixed_lengths(32768, 1)
    seconds = predicted_seconds(program, strategy, lengths, KNOWN["h100-sxm"])
    assert 0.4 < seconds < 0.7  # an H100 took 0.522 s: benchmarks/results/2026-11-27-1635-h100.md
    assert predicted_seconds(program, strategy, lengths, KNOWN["a100-80gb"]) > 1.5 * seconds
