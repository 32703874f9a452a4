"""One process reads the weights of a checkpoint, and notices what has changed since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hydragraph as hg
from hydragraph.runtime.checkpoint.alone import read_weights
from hydragraph.runtime.checkpoint.manifest import Damaged
from tests.models import captured


def test_weights_are_those_that_were_saved(tmp_path: Path) -> None:
    program, model = captured("llama")
    exe = hg.compile(model, "<tp1,pp1>", torch.optim.SGD, program=program)
    exe.save(tmp_path / "saved")
    weights = read_weights(tmp_path / "saved")
    exe.close()
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    shards = max((tmp_path / "saved").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(shards.read_bytes())
    data[len(data) // 2] ^= 1
    shards.write_bytes(data)
    with pytest.raises(Damaged, match=r"is not what was written: export another checkpoint"):
        read_weights(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"there is no complete\.json"):
        read_weights(tmp_path)
