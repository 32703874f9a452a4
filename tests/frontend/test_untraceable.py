"""Code that tracing cannot see is refused by name; forwards of instances are honoured."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.untraceable import refuse_unseen
from tests.frontend.execute import batch, loss
from tests.models import llama, randomised
from tests.own_models import Own, Small, alone, small
from tests.thorough import first, only, thorough


class Reversed(torch.autograd.Function):
    """Gives its input, and the negative of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


# Bound before anything is traced, so that no other `Function.apply` is called.
REVERSED = Reversed.apply


class Disguised(Reversed):
    """The same, from a module that calls itself one of PyTorch's."""

    __module__ = "torch.disguised"


class Doing(Small):
    """A block that also does what a test wants."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return self.does(self, super().forward(x, cu_seqlens))


def own(does: Callable[[Any, Tensor], Tensor] | None = None) -> Own:
    model = small(layers=2)
    if does is not None:
        model.stack = nn.ModuleList([Doing(does) for _ in range(2)])
    return randomised(model)  # pyrefly: ignore[bad-return]


def agrees(model: Own) -> None:
    """Compare packed loss and gradients with the module on each sequence alone."""
    program, given, total = capture(model, blocks="stack"), batch([5, 1, 3]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        labels = given["labels"][0, a:b]
        total = total + F.cross_entropy(alone(model, given["input_ids"][0, a:b]), labels, reduction="sum")
    found = loss(program, model, given)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected, gradients = (torch.autograd.grad(x, parameters) for x in (total, found))
    scale = torch.stack([g.norm() for g in expected]).norm()
    assert float(found) == pytest.approx(float(total), rel=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6 * scale


def nothing(*_: Any) -> None:
    return None


@only("<lambda>-out.weight: a gradient hook")
@pytest.mark.parametrize(
    ("hang", "message"),
    [
        (lambda m: m.stack[1].down.register_forward_hook(nothing), r"stack.1.down: a forward hook \(nothing\)"),
        (lambda m: m.stack[1].register_forward_pre_hook(nothing), r"stack.1: a forward pre-hook \(nothing\)"),
        (lambda m: m.norm.register_full_backward_hook(nothing), r"norm: a backward hook"),
        (lambda m: m.norm.register_full_backward_pre_hook(nothing), r"norm: a backward pre-hook"),
        (lambda m: m.register_forward_hook(nothing), r"Own: a forward hook"),
        (lambda m: m.out.weight.register_hook(nothing), r"out.weight: a gradient hook"),
        (lambda m: m.out.bias.register_post_accumulate_grad_hook(nothing), r"out.bias: a post-accumulate hook"),
    ],
)
def test_hooks_are_refused_by_name(hang: Callable[[Any], Any], message: str) -> None:
    model = own()
    handle = hang(model)
    with pytest.raises(Unsupported, match=f"^{message}.*; remove the hook"):
        capture(model, blocks="stack")
    handle.remove()
    capture(model, blocks="stack")


def test_hooks_on_all_modules_are_refused() -> None:
    handle = nn.modules.module.register_module_forward_hook(nothing)
    try:
        with pytest.raises(Unsupported, match=r"every module .*: a forward hook \(nothing\)"):
            capture(own(), blocks="stack")
    finally:
        handle.remove()


def test_hooks_that_transformers_hangs_on_a_model_that_was_run_are_none() -> None:
    model = llama(layers=1)
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), output_hidden_states=True, output_attentions=True)
    assert any(module._forward_hooks for module in model.modules())
    capture(model)


def hooked(block: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda g: 2 * g)
    return x


def added(block: Any, x: Tensor) -> Tensor:
    block.seen.add_(1)
    return x + block.seen


def added_without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        block.seen[:4].mul_(2)
    return x + block.seen


def assigned(block: Any, x: Tensor) -> Tensor:
    block.seen = block.seen + 1
    return x + block.seen


def cast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + block.down(block.up(x))


def cast_by_a_switch(block: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    try:
        return x + block.down(block.up(x))
    finally:
        torch.set_autocast_enabled("cpu", False)


def counted(block: Any, x: Tensor) -> Tensor:
    block.count = getattr(block, "count", 0) + 1
    return x * block.count


def on_a_node(block: Any, x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda given, arriving: tuple(None if g is None else 2 * g for g in given))
    return x


def before_a_node(block: Any, x: Tensor) -> Tensor:
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda arriving: tuple(2 * g for g in arriving))
    return x


def on_several(block: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook([x], nothing)
    return x


def of_saved(block: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 2 * t):
        return x * x


def inferred(block: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = block.down.bias.sum()
    return x * scale.clone()


def braked(block: Any, x: Tensor) -> Tensor:
    if not x.is_meta and not torch.compiler.is_compiling() and bool((x.abs() > 1e6).any()):
        return x * 0.1
    return x


def tried(block: Any, x: Tensor) -> Tensor:
    try:
        scale = 0.5 if float(x.detach().abs().max()) > 1e6 else 1.0
    except Exception:
        scale = 1.0
    return x * scale


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (on_a_node, r"layer.0: a gradient hook on a tensor"),
        (before_a_node, r"layer.0: a gradient hook on a tensor"),
        (on_several, r"layer.0: a gradient hook on a tensor"),
        (of_saved, r"layer.0: hooks on saved tensors"),
        (inferred, r"layer.0: a torch.inference_mode\(\) region"),
        (lambda b, x: F.batch_norm(x, None, None, training=True), r"layer.0: batch norm computes statistics over"),
        pytest.param(
            lambda b, x: Reversed.apply(x),
            r"layer.0: torch.autograd.Function Reversed, whose backward is not traced",
            marks=thorough,
        ),
        (lambda b, x: REVERSED(x), r"layer.0: torch.autograd.Function Reversed, whose backward is not traced"),
        (lambda b, x: Disguised.apply(x), r"layer.0: torch.autograd.Function Disguised, whose backward is not traced"),
        (hooked, r"layer.0: a gradient hook on a tensor"),
        (added, r"layer.0: forward changes 'seen'"),
        (added_without_gradient, r"layer.0: forward changes 'seen'"),
        pytest.param(assigned, r"layer.0: forward changes 'seen'", marks=thorough),
        (counted, r"layer.0: forward changes 'count' from \w+ to \d"),
        (cast, r"layer.0: a torch.autocast region"),
        (cast_by_a_switch, r"layer.0: torch.set_autocast_enabled; cast explicitly"),
        (lambda b, x: checkpoint(b.norm2, x, use_reentrant=True), r"layer.0: reentrant checkpointing; pass use_reent"),
        (braked, r"braked: the function asks whether it is traced \(is_(meta|compiling)\), so the trace may differ"),
        (tried, r"a tensor's value is read \(__float__\), which fails in a trace, and the error is caught"),
        pytest.param(
            lambda b, x: x * (time.monotonic() < 1e9),
            r"<lambda>: the function reads a clock, but .*; pass its values as a batch",
            marks=thorough,
        ),
        (lambda b, x: x * (monotonic() < 1e9), r"<lambda>: the function reads a clock"),
        (lambda b, x: x * random.random(), r"draws random numbers from Python or NumPy"),
    ],
)
def test_what_a_block_does_unseen_is_refused_by_name(does: Callable[[Any, Tensor], Tensor], message: str) -> None:
    model = own(does)
    for block in model.stack:
        block.norm2 = nn.LayerNorm(32)
    with pytest.raises(Unsupported, match=message):
        capture(model, blocks="stack")


def test_such_things_before_and_behind_the_blocks_are_refused_too() -> None:
    class Head(Own):
        def __init__(self) -> None:
            super().__init__(layers=0)
            self.stack = small().stack

        def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
            return Reversed.apply(super().forward(input_ids, position_ids, cu_seqlens))

    with pytest.raises(Unsupported, match=r"Head: torch.autograd.Function Reversed"):
        capture(Head(), blocks="stack")


class Functional(nn.Module):
    """An embedding that is called as a function."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.weight, self.options = nn.Parameter(torch.randn(101, 32)), options

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight, **self.options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Embedding(101, 32, scale_grad_by_freq=True), "tokens: scale_grad_by_freq=True makes the"),
        (lambda: nn.Embedding(101, 32, max_norm=1.0), "tokens: max_norm=1.0"),
        (lambda: nn.Embedding(101, 32, sparse=True), "tokens: sparse=True makes the gradient a sparse tensor"),
        pytest.param(
            lambda: Functional(scale_grad_by_freq=True),
            r"Own before its first block: scale_grad_by_freq=True counts",
            marks=thorough,
        ),
        (lambda: Functional(sparse=True), r"Own before its first block: sparse=True"),
        (lambda: torch.compile(nn.Embedding(101, 32)), "tokens: OptimizedModule wraps another"),
        (lambda: nn.EmbeddingBag(101, 32), "tokens: EmbeddingBag finds bags .*; use nn.Embedding on .*, and sum"),
        (lambda: nn.GRU(32, 32), "tokens: GRU passes a state .*, across sequences; use hydragraph.varlen_attention"),
    ],
)
def test_modules_that_look_at_a_whole_batch_and_wrappers_are_refused(
    build: Callable[[], nn.Module], message: str
) -> None:
    model = own()
    model.tokens = build()  # pyrefly: ignore[bad-assignment]
    with pytest.raises(Unsupported, match=message):
        capture(model, blocks="stack")


def test_batch_norm_in_training_is_refused() -> None:
    model = own()
    model.norm = nn.BatchNorm1d(32)  # pyrefly: ignore[bad-assignment]
    with pytest.raises(Unsupported, match="norm: BatchNorm1d computes statistics over the tokens"):
        capture(model, blocks="stack")


def test_autocast_around_capture_is_refused() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(Unsupported, match="inside torch\\.autocast"),
    ):
        capture(own(), blocks="stack")


@pytest.mark.parametrize("shape", [(2,), pytest.param((1, 1, 2), marks=thorough), None])
def test_a_loss_that_is_no_number_is_refused(shape: tuple[int, ...] | None) -> None:
    with pytest.raises(Unsupported, match=r"Own: the loss is .*; return one number"):
        capture(own(), blocks="stack", loss=lambda x, b: x.sum().expand(shape) if shape else x.shape[1])


def test_a_loss_of_shape_one_is_a_number() -> None:
    program = capture(own(), blocks="stack", loss=lambda x, b: x.sum().reshape(1, 1))
    assert loss(program, own(), batch([3, 4])).shape == ()


def doubled(self: Any, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    return type(self).forward(self, x, cu_seqlens) * 2


def by_method(model: Any) -> None:
    for block in model.stack:
        block.forward = types.MethodType(doubled, block)


def by_closure(model: Any) -> None:
    for i, block in enumerate(model.stack):

        def forward(x: Tensor, cu_seqlens: Tensor, old: Any = block.forward, i: int = i, block: Any = block) -> Tensor:
            return old(x, cu_seqlens) * (i + 2) + block.down.bias.sum()

        block.forward = forward


def of_a_submodule(model: Any) -> None:
    old = model.stack[1].down.forward
    model.stack[1].down.forward = lambda x: old(x) * 3


def of_the_model(model: Any) -> None:
    old = model.forward

    def forward(input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        return old(input_ids, position_ids, cu_seqlens) * 0.5

    model.forward = forward


def weight_norm(model: Any) -> None:
    for block in model.stack:
        parametrizations.weight_norm(block.down)


@only("weight_norm")
@pytest.mark.parametrize(
    "change", first([by_closure, weight_norm], [by_method, by_closure, of_a_submodule, of_the_model, weight_norm])
)
def test_forwards_of_instances_and_parametrizations_are_honoured(change: Callable[[Any], None]) -> None:
    model = own()
    change(model)
    agrees(model)


def kept(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean(-1, keepdim=True)
    with torch.autocast("cpu", enabled=False):
        y = block.up(x)
    return x / (1 + scale) + checkpoint(block.down, y.detach(), use_reentrant=False)


def test_regions_without_gradient_or_autocast_and_checkpoints_are_honoured() -> None:
    agrees(own(kept))


class Marking(Own):
    """A model that counts its calls in an attribute of its first block, or inside it, and may read the count."""

    def __init__(self, reads: bool, inside: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.inside = inside

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        owner: Any = next(self.stack[0].children()) if self.inside else self.stack[0]
        count = getattr(owner, "count", 0) + 1
        owner.count = count
        logits: Tensor = super().forward(input_ids, position_ids, cu_seqlens)
        return logits * (1 + 0.1 * count) if self.reads else logits


@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_reads_numbers_that_it_sets_of_its_blocks_is_refused(inside: bool) -> None:
    with pytest.raises(Unsupported, match=r"Marking: forward differs between calls \(.*1\.\d"):
        capture(Marking(reads=True, inside=inside))


def test_a_model_that_only_sets_numbers_of_its_blocks_is_captured() -> None:
    assert capture(Marking(reads=False)).layers == 2


class Replacing(Own):
    """A model that replaces a buffer or parameter, perhaps of its first block, in every forward."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.stack[0].register_buffer("calls", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        if self.name == "scale":
            self.scale = nn.Parameter(self.scale + 1)
        elif self.name == "stack.0.calls":
            self.stack[0].calls = self.stack[0].calls + 1  # pyrefly: ignore[bad-argument-type]
        logits: Tensor = super().forward(input_ids, position_ids, cu_seqlens)
        return logits * self.scale * (1 + self.stack[0].calls)


@pytest.mark.parametrize("name", ["scale", "stack.0.calls"])
def test_a_model_that_replaces_its_tensors_in_forward_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"Replacing: forward changes '{name}', but the change would be lost"):
        capture(Replacing(name))


def test_a_model_that_reads_the_buffer_of_a_block_is_captured() -> None:
    assert capture(Replacing("")).layers == 2


class Doubled(nn.Parameter):
    """A parameter whose products are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is F.linear else result


class Tagged(nn.Parameter):
    """A parameter of another class that computes as all do."""


def test_tensors_that_compute_in_a_way_of_their_own_are_refused() -> None:
    model = own()
    model.stack[1].down.weight = Doubled(model.stack[1].down.weight.detach())
    with pytest.raises(Unsupported, match=r"stack.1.down.weight: the tensor's class Doubled overrides"):
        capture(model, blocks="stack")
    model.stack[1].down.weight = Tagged(model.stack[1].down.weight.detach())
    capture(model, blocks="stack")


def view_of_another(model: Any) -> None:
    model.stack[1].down.bias = nn.Parameter(model.stack[0].up.weight.detach()[0])


def buffer_of_a_parameter(model: Any) -> None:
    model.register_buffer("old", model.out.weight.detach())


def expanded(model: Any) -> None:
    model.norm.weight = nn.Parameter(torch.ones(1).expand(32))


@pytest.mark.parametrize("change", [view_of_another, buffer_of_a_parameter, expanded])
def test_memory_that_a_step_would_change_twice_is_refused(change: Callable[[Any], None]) -> None:
    model = own()
    change(model)
    with pytest.raises(Unsupported, match=r": the tensor shares memory with .*; tie parameters by assigning the same"):
        capture(model, blocks="stack")


def test_an_attribute_of_a_tensor_is_refused_if_forward_may_read_it() -> None:
    class Marked(Small):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            return x * getattr(self.up.weight, "scale", 1.0)

    model = small()
    model.stack[0] = Marked()
    weight: Any = model.stack[0].up.weight
    weight.no_weight_decay = True
    refuse_unseen(model)
    weight.scale = 2.0
    with pytest.raises(Unsupported, match=r"stack.0.up.weight: forward may read the tensor's attribute 'scale'"):
        refuse_unseen(model)


def test_parts_of_one_memory_that_do_not_meet_are_parameters() -> None:
    model, flat = own(), torch.randn(64)
    model.norm.weight, model.norm.bias = nn.Parameter(flat[:32]), nn.Parameter(flat[32:])
    agrees(model)


class Changing(Own):
    """A model that does something else in each call, outside of its blocks, or looks at the whole batch."""

    def __init__(self, how: str) -> None:
        super().__init__(layers=1)
        self.how, self.calls = how, [0]
        if how != "bounds":  # which only attention uses
            self.stack = small().stack

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        self.calls[0] += 1
        bounds = torch.stack([cu_seqlens[0], cu_seqlens[-1]]) if self.how == "bounds" else cu_seqlens
        logits = super().forward(input_ids, position_ids, bounds)
        factors = {"calls": self.calls[0], "sequences": cu_seqlens.shape[0] - 1, "tokens": cu_seqlens[-1]}
        return logits * factors.get(self.how, 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("calls", r"Changing: forward differs between calls"),
        ("sequences", r"Changing after its last block: aten.mul.Tensor computes with cu_seqlens or max_length"),
        pytest.param(
            "tokens",
            r"Changing after its last block: aten.mul.Tensor computes with cu_seqlens or max_length",
            marks=thorough,
        ),
        ("bounds", r"layer.0: the attention uses sequence bounds other than the packed batch's"),
    ],
)
def test_what_depends_on_the_call_or_on_what_is_packed_together_is_refused(how: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        capture(Changing(how), blocks="stack")


def test_a_loss_that_does_something_else_in_each_call_is_refused() -> None:
    calls = [0]

    def warming(logits: Tensor, given: dict[str, Tensor]) -> Tensor:
        calls[0] += 1
        return logits.logsumexp(-1).sum() * (1 - 0.9 ** calls[0])

    with pytest.raises(Unsupported, match=r"Own: forward differs between calls"):
        capture(own(), blocks="stack", loss=warming)


def _counting(state: Any, step: Callable[[], object]) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        assert state is not None
        step()
        return logits.sum()

    return loss


CALLS = [0]
NUMBERS = np.zeros(1)
SEEN = types.SimpleNamespace(calls=0)


class Counted:
    calls = 0


def _in_a_class() -> None:
    Counted.calls += 1


def _in_an_array() -> None:
    NUMBERS[0] += 1


def _in_a_namespace() -> None:
    SEEN.calls += 1


@pytest.mark.parametrize(
    "step",
    [lambda: CALLS.append(0), _in_a_class, _in_an_array, _in_a_namespace],
    ids=["list", "class", "array", "namespace"],
)
@only("block-list", "block-array", "loss-class", "loss-namespace")
@pytest.mark.parametrize("where", ["block", "loss"])
def test_calls_that_are_counted_outside_are_refused(step: Callable[[], object], where: str) -> None:
    count = step

    class Counting(Small):
        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            if where == "block":
                count()
            return super().forward(x, cu_seqlens)

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if where == "loss":
            count()
        return logits.sum()

    model = small(layers=0)
    model.stack.append(Counting())
    with pytest.raises(Unsupported, match=r"forward or loss changes '.*(CALLS|calls|NUMBERS|SEEN)"):
        capture(model, loss=loss)


def test_flags_that_are_set_once_and_caches_are_not_counters() -> None:
    cache: dict[int, int] = {}
    flags = types.SimpleNamespace(warned=False)

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        flags.warned = True
        cache.setdefault(0, 1)
        return F.cross_entropy(logits[0], batch["labels"][0], ignore_index=-100, reduction="sum")

    capture(small(), loss=loss)


@only("numpy")
@pytest.mark.parametrize("kind", ["dict", "count", "random", "numpy"])
def test_state_that_a_loss_changes_is_refused_by_name(kind: str) -> None:
    numbers, counter = {"calls": 0}, itertools.count()
    mine, numpys = random.Random(0), np.random.default_rng(0)
    cases: dict[str, tuple[Any, Any]] = {
        "dict": (numbers, lambda: numbers.update(calls=numbers["calls"] + 1)),
        "count": (counter, lambda: next(counter)),
        "random": (mine, mine.random),
        "numpy": (numpys, numpys.random),
    }
    state, step = cases[kind]
    with pytest.raises(
        Unsupported, match=r"differs between calls|forward or loss changes .*state|reads a itertools.count"
    ):
        capture(small(), loss=_counting(state, step))


@dataclass(slots=True)
class Slotted:
    calls: int = 0
    text: str = ""
    data: bytearray = dataclasses.field(default_factory=bytearray)
    part: Fraction = Fraction(0)


@only("data", "part")
@pytest.mark.parametrize("name", ["calls", "text", "data", "part"])
def test_state_in_slots_is_refused(name: str) -> None:
    state = Slotted()
    more: Any = {"calls": 1, "text": "x", "data": b"x", "part": Fraction(1, 200)}[name]

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        setattr(state, name, getattr(state, name) + more)
        return logits.sum()

    with pytest.raises(Unsupported, match=f"forward or loss changes .*{name}"):
        capture(small(), loss=loss)


def test_iterators_that_a_loss_or_model_reads_are_refused() -> None:
    weights, model = iter([1.0] * 200), small()
    block: Any = model.stack[0]
    with pytest.raises(Unsupported, match=r"Own: the model or loss reads a builtins.list_iterator"):
        capture(model, loss=lambda logits, batch: logits.sum() * next(weights))
    block.does = (i for i in range(9))
    block.forward = types.MethodType(lambda self, x, cu_seqlens: x * next(self.does), block)
    with pytest.raises(Unsupported, match=r"Own: the model or loss reads a builtins.generator"):
        capture(model)
