"""Contents of a directory of safetensors files, and boxes of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hydragraph.checkpoint.weights.safetensors_files import contents, readers


def test_finds_each_tensor_where_the_index_says_it_is(tmp_path: Path) -> None:
    one, two = torch.arange(12.0).view(3, 4), torch.ones(2, dtype=torch.bfloat16)
    save_file({"a": one, "b": two}, tmp_path / "1.safetensors")
    save_file({"a": one + 1}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    held = contents(tmp_path)
    assert {k: (s.file.name, s.shape, s.dtype) for k, s in held.items()} == {
        "a": ("2.safetensors", (3, 4), "F32"),
        "b": ("1.safetensors", (2,), "BF16"),
    }
    boxes = {
        n: read(torch.Size([1] * len(held[n].shape)), torch.Size([1] * len(held[n].shape)))
        for n, read in readers(held.items())
    }
    assert boxes["a"].tolist() == [[6.0]]
    assert boxes["b"].tolist() == [1.0]


def test_a_whole_box_is_the_tensor(tmp_path: Path) -> None:
    tensor = torch.arange(6).view(2, 3)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    ((name, read),) = readers([("mine", contents(tmp_path)["a"])])
    assert name == "mine"
    assert torch.equal(read(torch.Size([0, 0]), torch.Size([2, 3])), tensor)
