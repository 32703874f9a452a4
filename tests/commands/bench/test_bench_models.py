"""Models and lengths of benchmarks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.commands.bench.bench_models import (
    draw_sequences,
    meta_model,
    mixed_lengths,
)
from tests.commands.tiny import write


def test_named_models_have_the_sizes_of_their_names() -> None:
    counts = {name: sum(p.numel() for p in meta_model(name).parameters()) for name in ("1b", "7b")}
    assert counts == {"1b": 1_104_218_112, "7b": 6_738_415_616}


def test_the_model_of_a_run() -> None:
    demo = Path(__file__).parents[3] / "examples/demo.yaml"
    assert meta_model(str(demo)).config.num_hidden_layers == 8
    with pytest.raises(ValueError, match="--model nowhere: name one of tiny, small, 1b, 7b, or a run's YAML file"):
        meta_model("nowhere")


def test_the_model_of_a_run_has_its_adapters(tmp_path: Path) -> None:
    config = write(tmp_path, adapter={"lora": {"r": 4}})
    assert any("lora_A" in name for name, _ in meta_model(str(config)).named_parameters())


@given(st.integers(2, 5000), st.integers(0, 5), st.integers(8, 300))
def test_lengths_add_up_and_leave_no_token_alone(tokens: int, seed: int, longest: int) -> None:
    lengths = mixed_lengths(tokens, seed, longest, shortest=4)
    assert sum(lengths) == tokens
    assert min(lengths) >= 2
    assert max(lengths) <= longest + 1  # a last token joins the sequence before it
    assert lengths == mixed_lengths(tokens, seed, longest, shortest=4)


def test_sequences_are_the_same_for_the_same_seed() -> None:
    found, again = draw_sequences([3, 5], 10, 7), draw_sequences([3, 5], 10, 7)
    assert [len(s) for s in found] == [3, 5]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert max(int(s.max()) for s in found) < 10
