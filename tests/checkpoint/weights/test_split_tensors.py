"""Tensors in pieces: their places equal what stacking and concatenating the tensors gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from hydragraph.checkpoint.weights.pretrained import TensorNames
from hydragraph.checkpoint.weights.safetensors_files import StoredTensor
from hydragraph.checkpoint.weights.split_tensors import JoinedTensor, assemble
from hydragraph.engine.compiled_model import tensor_names

loading = pytest.importorskip("transformers.core_model_loading")


def converter(patterns: list[str], operations: list[Any], targets: int = 1) -> Any:
    return loading.WeightConverter(patterns, [f"whole{i}" for i in range(targets)], operations)


def stored(tensors: dict[str, list[Tensor]]) -> dict[str, list[StoredTensor]]:
    named = {p: [(f"{p}.{i}", t) for i, t in enumerate(several)] for p, several in tensors.items()}
    return {p: [StoredTensor(Path("file"), n, tuple(t.shape), "F32") for n, t in each] for p, each in named.items()}


def read(whole: JoinedTensor, tensors: dict[str, Tensor], offsets: list[int], box: Tensor) -> None:
    for piece in whole.pieces:
        found = piece.within(offsets, box.shape)
        if found is not None:
            at, sizes = found.source
            part = tensors[piece.stored.key][tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))]
            box[found.target] = part.view(found.sizes)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(-3, 2), st.integers(-3, 2), st.booleans())
def test_every_box_of_a_whole_is_what_the_operations_make(
    data: st.DataObject, patterns: int, experts: int, stack: int, cat: int, concatenated: bool
) -> None:
    sizes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    names = [f"pattern{i}" for i in range(patterns if concatenated else 1)]
    tensors = {p: [torch.rand(sizes) for _ in range(experts)] for p in names}
    operations = [loading.MergeModulelist(dim=stack)] + [loading.Concatenate(dim=cat)] * concatenated
    wanted = [torch.stack(each, stack) for each in tensors.values()]
    expected = torch.cat(wanted, cat) if concatenated else wanted[0]

    made = assemble(converter(names, operations), stored(tensors), "layers.0.whole0.weight")
    assert made is not None
    assert list(made) == ["layers.0.whole0.weight"]
    (whole,) = made.values()
    assert whole.shape == expected.shape
    by_key = {f"{p}.{i}": t for p, several in tensors.items() for i, t in enumerate(several)}
    lows = [data.draw(st.integers(0, n)) for n in whole.shape]
    highs = [data.draw(st.integers(lo, n)) for lo, n in zip(lows, whole.shape, strict=True)]
    box = torch.full([hi - lo for lo, hi in zip(lows, highs, strict=True)], torch.nan)
    read(whole, by_key, lows, box)
    assert box.equal(expected[tuple(slice(lo, hi) for lo, hi in zip(lows, highs, strict=True))])


def test_a_scalar_is_read() -> None:
    box = torch.zeros(())
    read(JoinedTensor.of(StoredTensor(Path("file"), "one", (), "F32")), {"one": torch.tensor(3.0)}, [], box)
    assert box == 3


@given(st.data(), st.integers(1, 4), st.integers(-2, 1))
def test_every_box_of_a_chunk_is_read(data: st.DataObject, count: int, dim: int) -> None:
    sizes = [data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))]
    sizes[dim] *= count
    tensor = torch.rand(sizes)
    made = assemble(converter(["fused"], [loading.Chunk(dim=dim)], count), stored({"fused": [tensor]}), "a.whole0.bias")
    assert made is not None
    assert list(made) == [f"a.whole{i}.bias" for i in range(count)]
    for whole, expected in zip(made.values(), tensor.chunk(count, dim), strict=True):
        assert whole.shape == expected.shape
        lows = [data.draw(st.integers(0, n)) for n in whole.shape]
        highs = [data.draw(st.integers(lo, n)) for lo, n in zip(lows, whole.shape, strict=True)]
        box = torch.full([hi - lo for lo, hi in zip(lows, highs, strict=True)], torch.nan)
        read(whole, {"fused.0": tensor}, lows, box)
        assert box.equal(expected[tuple(slice(lo, hi) for lo, hi in zip(lows, highs, strict=True))])


@pytest.mark.parametrize(
    ("operations", "targets"),
    [
        ([loading.Chunk(dim=0)], 3),
        ([loading.Transpose(0, 1)], 1),
        ([loading.Chunk(dim=0, num_shards_attribute="num_experts")], 1),
    ],
    ids=["uneven", "transposed", "by the config"],
)
def test_what_computes_or_does_not_divide_is_none(operations: list[Any], targets: int) -> None:
    held = stored({"pattern0": [torch.rand(2, 2)]})
    assert assemble(converter(["pattern0"], operations, targets), held, "whole0.weight") is None


@pytest.mark.parametrize("family", ["nomic_bert", "gte"])
def test_a_directory_of_chunks_gives_the_models_tensors(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "head_dim": 16,
    }
    model = transformers.AutoModelForMaskedLM.from_config(transformers.CONFIG_MAPPING[family](**sizes, vocab_size=101))
    model.save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    files = {key: StoredTensor(tmp_path / "model.safetensors", key, tuple(t.shape), "F32") for key, t in held.items()}
    own = dict(model.named_parameters())
    placed = [each for each in TensorNames.of(model, tensor_names(model)).placed(files) if each[0] in own]
    assert len(placed) > len(held), "one stored tensor gives several"
    for name, whole in placed:
        box = torch.full(whole.shape, torch.nan)
        read(whole, held, [0] * len(whole.shape), box)
        assert box.equal(own[name].detach()), name
