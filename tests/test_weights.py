"""Weights handed to a server, block by block, are those that `save_pretrained` writes, on the ranks that want them."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.checkpoint.weights.pretrained_directory import MetaModel, published_keys
from tests.models import gpt2, llama, mixtral, randomised, sequences
from tests.ready import Ready
from tests.test_peft import adapted
from tests.thorough import first

MODELS = {
    "mixtral": mixtral,  # transformers splits the experts' weights in its files
    "tied gpt2": partial(gpt2, layers=2),
    "adapters": adapted,
}
STRATEGY = "<[0,1]x1,[2]x1>"


def ready(model: str) -> Ready:
    chosen = "<[2,0]x2sr>" if model == "mixtral" else STRATEGY
    return Ready.of(randomised(MODELS[model]()), [chosen])


def handed_over(prepared: Ready, path: str) -> dict[str, Tensor]:
    (strategy,) = prepared.variants.strategies
    exe = prepared.executable(strategy, lambda named: torch.optim.SGD(named, lr=0.1))
    exe.step(sequences([9, 4, 6]))
    exe.save_pretrained(path)
    state = [exe.full_state_dict()]
    dist.broadcast_object_list(state)
    prepared.model.load_state_dict(state[0])
    found = dict(exe.weights(to=(2, 0)))
    for name, tensor in exe.weights(torch.bfloat16):
        assert torch.equal(tensor, found[name].bfloat16())
        break  # the other ranks do not wait for the rest
    exe.step(sequences([9, 4, 6]))
    unfinished = exe.weights(to=range(exe.ranks))
    next(unfinished)
    assert isinstance(unfinished, Generator)
    exe.close()
    unfinished.close()  # needs no other rank
    return found


@pytest.mark.parametrize("model", first(["mixtral"], MODELS))
def test_ranks_that_ask_get_what_save_pretrained_writes(model: str, tmp_path: Path) -> None:
    runs = hg.launch(handed_over, 3, ready(model), str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    written = load_file(file)
    assert not runs[1]
    for found in (runs[0], runs[2]):
        assert found.keys() == written.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in written.items())


class Buffered(nn.Module):
    """A custom module with a persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(101, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 101)
        self.register_buffer("scale", torch.tensor([1, 2]))

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits [1, T, 101]."""
        x = self.embed(input_ids) * self.scale[1]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_module_of_ones_own_keeps_its_names_and_a_loop_must_end_before_the_next_call() -> None:
    exe = hg.compile(Buffered(), "<tp1,pp1>", lambda named: torch.optim.SGD(named, lr=0.1))
    state = exe.full_state_dict()
    loop = exe.weights(dtype=torch.float16)
    name, tensor = next(loop)
    assert tensor.dtype == torch.float16
    with pytest.raises(ValueError, match=r"step: a loop over weights\(\) has not ended"):
        exe.step(sequences([9]))
    rest: Mapping[str, Tensor] = {name: tensor, **dict(loop)}
    assert rest.keys() == state.keys()
    assert torch.equal(rest["scale"], torch.tensor([1, 2]))
    torch.testing.assert_close(rest["embed.weight"].float(), state["embed.weight"], rtol=1e-3, atol=1e-4)
    exe.step(sequences([9]))
    exe.weights()  # a loop that is discarded before it begins
    exe.step(sequences([9]))
    with pytest.raises(ValueError, match=r"weights: to=\(1,\) must list different ranks from 0 to 0"):
        exe.weights(to=(1,))
    with pytest.raises(ValueError, match=r"dtype torch.int8 is not a floating dtype"):
        exe.weights(dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype 'bfloat16' is not a floating dtype; give torch.bfloat16"):
        exe.weights(dtype="bfloat16")  # pyrefly: ignore[bad-argument-type]
    unfinished = exe.weights()
    next(unfinished)
    exe.close()
    with pytest.raises(ValueError, match=r"weights: the executable was closed in this loop; leave the loop before"):
        dict(unfinished)


def test_a_step_does_not_change_weights_handed_out_nor_the_reverse() -> None:
    exe = hg.compile(Buffered(), "<tp1,pp1>", lambda named: torch.optim.SGD(named, lr=0.1))
    before = exe.full_state_dict()
    found = dict(exe.weights())
    exe.step(sequences([9]))
    for name, tensor in found.items():
        assert torch.equal(tensor, before[name])
    trained = exe.full_state_dict()
    assert not torch.equal(trained["head.weight"], before["head.weight"])
    for handed in (dict(exe.weights()), exe.full_state_dict()):
        for tensor in handed.values():
            tensor.zero_()
    for name, tensor in exe.full_state_dict().items():
        assert torch.equal(tensor, trained[name])
    exe.close()


def test_several_adapters_are_refused() -> None:
    model = peft.get_peft_model(llama(layers=1), peft.LoraConfig(target_modules=["up_proj"]))
    model.add_adapter("second", peft.LoraConfig(target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(hg.Unsupported, match=r"a peft model with several adapters \(default, second\)"):
        published_keys(MetaModel(model))
