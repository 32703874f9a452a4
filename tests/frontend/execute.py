"""Run a captured program on one device, block by block, as an oracle for tests."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, fx, nn

from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program


def run(program: Program, model: nn.Module, block: Block, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Run one block's template with the model's weights and `values` for its other inputs."""
    template = program.templates[block.template]
    held = dict([*model.named_parameters(), *model.named_buffers()])
    arguments = [held[name] for name in (*block.parameters, *block.buffers)]
    return _Executed(template.graph).run(*arguments, *(values[name] for name in template.inputs))


class _Executed(fx.Interpreter):
    """Runs a template unchanged: one device holds everything, so nodes that communicate pass their input on."""

    def call_function(self, target, args, kwargs):  # pyrefly: ignore[implicit-any-parameter, unannotated-return]
        return args[0] if target is communicate else super().call_function(target, args, kwargs)


def batch(lengths: list[int], vocab: int = 101) -> dict[str, Tensor]:
    """Pack random sequences of the given lengths."""
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(0, vocab, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    labels = torch.cat([torch.cat([ids[0, a + 1 : b], torch.tensor([-100])]) for a, b in pairwise(bounds.tolist())])
    return {
        "input_ids": ids,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "labels": labels[None],
        "cu_seqlens": bounds,
        "max_length": torch.tensor(max(lengths)),
    }


def with_aux(
    block: Block, values: dict[str, Tensor], aux: tuple[Tensor, ...], inputs: tuple[str, ...]
) -> dict[str, Tensor]:
    """Add a block's inputs "other.*" from the aux graph's outputs."""
    others = [name for name in inputs if name.startswith("other.")]
    return values | {name: aux[i] for name, i in zip(others, block.aux, strict=True)}


def loss(program: Program, model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """Run all blocks on a packed batch; return the summed loss."""
    aux, values = run(program, model, program.aux, given), dict(given)
    for block in program.blocks:
        values = with_aux(block, values, aux, program.templates[block.template].inputs)
        (values["hidden"],) = run(program, model, block, values)
    return values["hidden"]
