"""One process reads the weights of a checkpoint, and notices what has changed since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.checkpoint.manifest import Damaged
from hydragraph.checkpoint.standalone_reader import read_weights
from tests.models import captured
from tests.own_models import Own, Small


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
    with pytest.raises(Damaged, match=r"\.distcp is corrupt: SHA-256 .*: export another checkpoint"):
        read_weights(tmp_path / "saved")
    shards.unlink()
    with pytest.raises(Damaged, match=r"\.distcp is missing \(expected .*\): export another checkpoint"):
        read_weights(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"has no complete\.json"):
        read_weights(tmp_path)


class Scaled(Own):
    """A model with a persistent buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__(layers=0)
        self.stack = nn.ModuleList([Small()])
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        return super().forward(input_ids, position_ids, cu_seqlens) * self.scale


def test_persistent_buffers_are_saved_and_read_back(tmp_path: Path) -> None:
    def compiled(model: nn.Module) -> hg.Executable:
        return hg.compile(model, "<tp1,pp1>", lambda n: torch.optim.SGD(n, lr=0.1), check="off", backend="eager")

    exe = compiled(Scaled(4.5))
    exe.step([torch.arange(2, 20)])
    exe.save(tmp_path / "saved")
    state = exe.full_state_dict()
    exe.close()
    assert read_weights(tmp_path / "saved")["scale"] == 4.5
    again = compiled(Scaled(0.0))
    again.load(tmp_path / "saved")
    for key, tensor in again.full_state_dict().items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=0, msg=key)


def test_a_checkpoint_with_other_buffers_changes_nothing(tmp_path: Path) -> None:
    exe = hg.compile(Scaled(4.5), "<tp1,pp1>", check="off", backend="eager")
    exe.save(tmp_path / "saved")
    pieces = hg.Pieces(memory=False, disk=tmp_path / "pieces")
    exe.keep(pieces)
    pieces.wait()
    exe.close()
    other = Scaled(4.5)
    other.scale = other.scale[None]  # a shape to which the saved buffer would be broadcast
    again = hg.compile(other, "<tp1,pp1>", check="off", backend="eager")
    before = again.full_state_dict()
    for source in (tmp_path / "saved", hg.Pieces(memory=False, disk=tmp_path / "pieces")):
        with pytest.raises(ValueError, match=r"scale is \[\] in the checkpoint and \[1\] in the model: load it into"):
            again.load(source)
    after = again.full_state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    again.close()
