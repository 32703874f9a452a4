"""Blocks share a template only where they compute the same, whatever tells them apart."""

from __future__ import annotations

import contextvars
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture, origin
from tests.frontend.test_module_digest import Setting, kind, times
from tests.frontend.test_untraceable import agrees
from tests.models import captured, llama, randomised
from tests.own_models import Own, Small
from tests.thorough import only, thorough

SCALES = [1.5, 2.5]
TABLE: dict[int, float] = {}


class Scaled(Small):
    """A block that multiplies its result by a number that a test computes from the block."""

    def __init__(self, index: int, scale: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer_idx, self.scale = index, scale
        self._hidden, self.setting, self.listed = 1.5 + index, Setting(1.5 + index), {"a": [1.5 + index]}
        self.closure, self.made, self.bound = times(1.5 + index), kind(1.5 + index)(), Setting(1.5 + index).scaled
        TABLE[id(self)] = 1.5 + index

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return super().forward(x, cu_seqlens) * self.scale(self, x)


def marked(block: Any, x: Tensor) -> float:
    return (f"{block.layer_idx}" == "1" and 2.5) or 1.5


def detached(block: Any, x: Tensor) -> Tensor:
    return x.detach() if block.layer_idx else x


def ungraded(block: Any, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(not block._hidden > 2):
        return x.sigmoid()


@only("<lambda>2")
@pytest.mark.parametrize(
    "scale",
    [
        lambda b, x: b._hidden,
        lambda b, x: b.setting.value,
        lambda b, x: b.listed["a"][0],
        lambda b, x: b.closure(1.0),
        lambda b, x: b.made(1.0),
        lambda b, x: b.bound(1.0),
        lambda b, x: 0.5 * b.layer_idx + 1,
        lambda b, x: 2**b.layer_idx,
        lambda b, x: int(b.layer_idx) + 1,
        lambda b, x: SCALES[b.layer_idx],
        lambda b, x: x.new_ones(()) * b.layer_idx + 1,
        lambda b, x: torch.tensor(1.5 + b.layer_idx).item(),
        marked,
        detached,
        ungraded,
    ],
)
def test_layers_that_differ_are_never_taken_for_equal(scale: Callable[[Any, Tensor], Any]) -> None:
    model = Own(layers=2)
    model.stack = nn.ModuleList([Scaled(i, scale) for i in range(2)])
    agrees(randomised(model))  # pyrefly: ignore[bad-argument-type]


def test_a_layer_between_equal_layers_is_not_taken_for_one() -> None:
    model = Own(layers=0)
    model.stack = nn.ModuleList([Scaled(0, lambda b, x: b.constant[0].item()) for _ in range(4)])
    for i, block in enumerate(model.stack):
        block._hidden = 0.0  # pyrefly: ignore[bad-argument-type]
        block.constant = [torch.tensor(2.5 if i == 2 else 1.5)]  # pyrefly: ignore[bad-argument-type]
    program = capture(randomised(model), blocks="stack")
    assert [program.blocks[1].template == block.template for block in program.blocks[1:5]] == [True, True, False, True]
    agrees(model)


def test_layers_that_differ_in_what_they_do_not_read_are_equal() -> None:
    model = Own(layers=2)
    model.stack = nn.ModuleList([Scaled(i, lambda b, x: 2.0) for i in range(2)])
    program = capture(model, blocks="stack")
    assert program.blocks[1].template == program.blocks[2].template
    assert len(program.blocks[1].template) == 64


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


@thorough
def test_a_parametrization_of_one_layer_makes_it_another() -> None:
    model = randomised(Own(layers=2))
    parametrize.register_parametrization(model.stack[1].down, "weight", Squared())
    program = capture(model, blocks="stack")
    assert program.blocks[1].template != program.blocks[2].template
    agrees(model)  # pyrefly: ignore[bad-argument-type]


CALLS = [0]


def counted(block: Any, x: Tensor) -> float:
    CALLS[0] += 1
    return float(CALLS[0])


def counting(block: Any, x: Tensor) -> float:
    block.calls = getattr(block, "calls", 0) + 1
    return float(block.calls)


def test_state_outside_of_a_block_is_refused() -> None:
    model = Own(layers=1)
    model.stack = nn.ModuleList([Scaled(0, counted)])
    with pytest.raises(Unsupported, match=r"layer.0: forward or loss changes 'the global CALLS\[0\]'"):
        capture(model, blocks="stack")


class Between(Own):
    """A model that marks its middle block by something other than an argument."""

    def __init__(self, mark: Callable[[Any, int], None], read: Callable[[Any], Any]) -> None:
        super().__init__(layers=0)
        self.shared = nn.Module()
        self.mark = mark

        class Reading(Small):
            def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
                return super().forward(x, cu_seqlens) * (2.0 if read(self) else 1.0)

        self.stack = nn.ModuleList(Reading() for _ in range(3))
        for block in self.stack:
            block.shared = self.shared

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = (self.tokens(input_ids) + self.places(position_ids))[0]
        for i, block in enumerate(self.stack):
            self.mark(self, i)
            x = block(x, cu_seqlens)
        return self.out(self.norm(x))[None]


MARK = contextvars.ContextVar("mark", default=False)
NAMES = types.SimpleNamespace(odd=False)


@only("namespace", "attribute")
@pytest.mark.parametrize(
    ("mark", "read"),
    [
        (lambda model, i: setattr(NAMES, "odd", i == 1), lambda block: NAMES.odd),
        (lambda model, i: TABLE.update({0: i == 1}), lambda block: TABLE[0]),
        (lambda model, i: setattr(model.shared, "local", i == 1), lambda block: block.shared.local),
    ],
    ids=["namespace", "dictionary", "attribute"],
)
def test_what_a_model_sets_between_blocks_is_refused(
    mark: Callable[[Any, int], None], read: Callable[[Any], Any]
) -> None:
    with pytest.raises(Unsupported, match=r"layer.1: the block reads a value that the model changes between blocks"):
        capture(Between(mark, read))
    capture(Between(lambda model, i: mark(model, 1), read))


def test_a_checkpoint_around_each_block_changes_nothing() -> None:
    class Checkpointed(Own):
        def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            x = (self.tokens(input_ids) + self.places(position_ids))[0]
            for block in self.stack:
                x = checkpoint(block, x, cu_seqlens, use_reentrant=False)
            return self.out(self.norm(x))[None]

    agrees(randomised(Checkpointed()))  # pyrefly: ignore[bad-argument-type]


def test_context_variables_are_refused() -> None:
    def mark(model: Any, i: int) -> None:
        MARK.set(i == 1)

    with pytest.raises(Unsupported, match=r"reads a _contextvars.ContextVar, whose changes a compiled graph would"):
        capture(Between(mark, lambda block: MARK.get()))


def test_state_in_an_attribute_is_refused_by_name() -> None:
    model = Own(layers=1)
    model.stack = nn.ModuleList([Scaled(0, counting)])
    with pytest.raises(Unsupported, match=r"layer.0: forward changes 'calls' from \d to \d"):
        capture(model, blocks="stack")


def test_a_program_of_a_model_that_differs_out_of_sight_is_refused() -> None:
    program, _ = captured("llama")
    other = llama(layers=2)
    strategy = hg.Strategy.parse("<tp1,pp1>", layers=2)
    assert origin(other) == program.origin
    other.model.layers[0]._scale = 2.0
    with pytest.raises(ValueError, match="captured from a model other than this"):
        hg.compile(other, strategy, program=program)


@thorough
def test_depth_is_nearly_free() -> None:
    capture(Own(layers=1))
    began = time.process_time()
    capture(Own(layers=1))
    between = time.process_time()
    program = capture(Own(layers=48))
    assert len({b.template for b in program.blocks}) == 3
    assert time.process_time() - between <= 6 * (between - began)  # tracing 48 blocks would take 25 times as long
