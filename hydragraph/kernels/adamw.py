"""AdamW for flat fp32 shards and the 16-bit copies sent to other ranks, in one pass over memory.

Operations are in the order of `torch.optim.AdamW` (Loshchilov & Hutter, 2019):
    w <- w (1 - lr decay);  m <- m + (1 - b1) (g - m);  s <- b2 s + (1 - b2) g^2
    w <- w - lr / (1 - b1^t) m / (sqrt(s) / sqrt(1 - b2^t) + eps)
"""

# Triton compiles functions without annotations.
# pyrefly: ignore-errors[implicit-any-parameter, unannotated-return]
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from hydragraph.errors import Unsupported
from hydragraph.kernels.triton_jit import KernelVariant, kernel, require_one_device, use_kernel

if TYPE_CHECKING:
    import triton.language as tl

# If lengths are multiples of this, Triton uses wide memory accesses
UNIT = 16
_BLOCK = 1024
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@kernel()
def _adamw(
    weights, gradients, moments, squares, copies, count,
    decay, first_rate, second_keep, second_rate, step_size, root, eps,
    MAXIMIZE: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    weight = tl.load(weights + index, mask=inside, other=0.0) * decay
    gradient = tl.load(gradients + index, mask=inside, other=0.0)
    if MAXIMIZE:
        gradient = -gradient
    moment = tl.load(moments + index, mask=inside, other=0.0)
    # torch.lerp computes `near` if its weight is below 0.5, else `far`.
    near = moment + first_rate * (gradient - moment)
    far = gradient - (gradient - moment) * (1.0 - first_rate)
    moment = tl.where(first_rate < 0.5, near, far)
    square = tl.load(squares + index, mask=inside, other=0.0) * second_keep
    square += second_rate * gradient * gradient
    weight -= tl.div_rn(step_size * moment, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    tl.store(weights + index, weight, mask=inside)
    tl.store(moments + index, moment, mask=inside)
    tl.store(squares + index, square, mask=inside)
    if COPY:
        tl.store(copies + index, weight.to(copies.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class AdamWSettings:
    """Hyperparameters, as in `torch.optim.AdamW`."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    maximize: bool = False

    @property
    def torch_options(self) -> dict[str, Any]:
        first, second = self.betas
        decay = self.weight_decay
        options = {"lr": self.lr, "beta1": first, "beta2": second, "weight_decay": decay, "eps": self.eps}
        return {**options, "amsgrad": False, "maximize": self.maximize}

    def numbers(self, step: int) -> tuple[float, ...]:
        """Return the kernel's scalars for a step, counted from 1."""
        first, second = self.betas
        size = self.lr / (1 - first**step)
        root = (1 - second**step) ** 0.5
        return (1 - self.lr * self.weight_decay, 1 - first, second, 1 - second, size, root, self.eps)


@dataclass(frozen=True, eq=False)
class Shard:
    """Flat parameter and its AdamW state: contiguous 1-D tensors of equal length, fp32 except `copy`."""

    weight: Tensor
    gradient: Tensor
    moment: Tensor
    square: Tensor
    copy: Tensor | None
    step: int

    def tensors(self) -> list[Tensor]:
        kept = [self.weight, self.gradient, self.moment, self.square]
        return kept if self.copy is None else [*kept, self.copy]

    def part(self, low: int, high: int) -> Shard:
        weight, gradient, moment, square, *copy = (x[low:high] for x in self.tensors())
        return Shard(weight, gradient, moment, square, copy[0] if copy else None, self.step)


def update(shards: Sequence[Shard], settings: AdamWSettings) -> None:
    """Apply one AdamW step in place.

    Raises:
        Unsupported: a tensor is not flat, contiguous and fp32 (copies: bf16 or fp16), or devices differ.
    """
    _apply([run for _, run in runs(shards)], settings)


def _apply(checked: Sequence[Shard], settings: AdamWSettings) -> None:
    if checked and use_kernel(checked[0].weight.device, "adamw"):
        for run in checked:
            launch(run, settings)
    elif checked:
        fused(checked, settings)


def fused(shards: Sequence[Shard], settings: AdamWSettings) -> None:
    """Run PyTorch's fused CPU operator so that a weight's result does not depend on its position in a shard.

    The operator rounds a vector's last size % 16 elements differently, so these elements of all shards with equal step
    counts are joined and padded.
    """
    # bodies: multiples of 16 elements; tails: the rest of each shard.
    bodies: list[Shard] = []
    tails: list[Shard] = []
    for shard in shards:
        size = shard.weight.numel()
        body = size // UNIT * UNIT
        if body == size:
            bodies.append(shard)
            continue
        if body:
            bodies.append(shard.part(0, body))
        tails.append(shard.part(body, size))
    _fused(bodies, settings)
    for step in {tail.step for tail in tails}:
        ends = [tail for tail in tails if tail.step == step]
        sizes = [tail.weight.numel() for tail in ends]
        # Padding makes joined tails multiples of 16.
        joined = [F.pad(torch.cat(column), (0, -sum(sizes) % UNIT)) for column in _columns(ends)]
        weight, gradient, moment, square = joined
        _fused([Shard(weight, gradient, moment, square, None, step)], settings)
        for tail, *updated in zip(ends, *(vector[: sum(sizes)].split(sizes) for vector in joined), strict=True):
            for kept, new in zip((tail.weight, tail.moment, tail.square), (updated[0], *updated[2:]), strict=True):
                kept.copy_(new)
    for shard in shards:
        if shard.copy is not None:
            shard.copy.copy_(shard.weight)


def _fused(shards: Sequence[Shard], settings: AdamWSettings) -> None:
    if not shards:
        return
    steps = {step: torch.tensor(float(step)) for step in {shard.step for shard in shards}}
    counts = [steps[shard.step] for shard in shards]
    torch.ops.aten._fused_adamw_(*_columns(shards), [], counts, **settings.torch_options)


def reference(shards: Sequence[Shard], settings: AdamWSettings) -> None:
    steps = [torch.tensor(float(shard.step - 1)) for shard in shards]
    weights, gradients, moments, squares = _columns(shards)
    torch_adamw(weights, gradients, moments, squares, [], steps, foreach=False, **settings.torch_options)
    for shard in shards:
        if shard.copy is not None:
            shard.copy.copy_(shard.weight)


def _columns(shards: Sequence[Shard]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*(shard.tensors()[:4] for shard in shards), strict=True)]


def runs(shards: Sequence[Shard]) -> list[tuple[int, Shard]]:
    """Join shards with equal step counts that are adjacent in the same storages.

    Returns:
        (index of the first shard, joined shard) pairs, without empty shards.
    """
    groups: list[tuple[int, list[Shard]]] = []
    for i, shard in enumerate(shards):
        if not shard.weight.numel():
            continue
        _check(shard)
        if groups and _follows(groups[-1][1][-1], shard):
            groups[-1][1].append(shard)
        else:
            groups.append((i, [shard]))
    return [(first, _join(run)) for first, run in groups]


def launch(shard: Shard, settings: AdamWSettings) -> None:
    size = shard.weight.numel()
    body = size // UNIT * UNIT
    constants = {"MAXIMIZE": settings.maximize, "COPY": shard.copy is not None, "BLOCK": _BLOCK}
    # The first launch has a multiple of 16 elements, for wide accesses. Without copies, the kernel
    # gets another tensor, but does not write it.
    for low, high in ((0, body), (body, size)):
        if low < high:
            parts = shard.part(low, high).tensors()
            grid = (-(-(high - low) // _BLOCK),)
            numbers = settings.numbers(shard.step)
            _adamw[grid](*parts[:4], parts[-1], high - low, *numbers, **constants, **_OPTIONS)


def variants() -> Iterator[KernelVariant]:
    names = ("decay", "first_rate", "second_keep", "second_rate", "step_size", "root", "eps")
    for copy in (False, True):
        signature = dict.fromkeys(("weights", "gradients", "moments", "squares"), "*fp32")
        signature |= {"copies": "*bf16" if copy else "*fp32", "count": "i64"} | dict.fromkeys(names, "fp32")
        constants = {"MAXIMIZE": False, "COPY": copy, "BLOCK": _BLOCK}
        yield KernelVariant(f"adamw{' copy' * copy}", _adamw, signature, constants, _OPTIONS, ("count",))


@dataclass(eq=False)
class _Prepared:
    """Joined shards of a parameter group, reused while its tensors are the same.

    Attributes:
        marks: addresses and shapes that identify the tensors.
        next: step counts that the next step needs to reuse `runs`.
    """

    marks: list[tuple[Any, ...]]
    next: list[float]
    runs: list[tuple[int, Shard]]


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` for flat shards, in one pass over memory, with a compatible state dict.

    Use it as `hydragraph.compile(optimizer=lambda named: AdamW(named, lr=...))`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, foreach=False)
        self._copies: dict[Tensor, Tensor] = {}
        self._prepared: dict[int, _Prepared] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer; call `copy_to` again to set 16-bit copies."""
        for group in state.get("param_groups", ()):
            refuse_amsgrad(group)
        super().__setstate__(state)
        self.__dict__.setdefault("_copies", {})
        self._prepared = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_amsgrad(param_group)
        super().add_param_group(param_group)

    def copy_to(self, copies: Mapping[Tensor, Tensor]) -> None:
        """Make steps also write a parameter's new weights to a copy, a 1-D 16-bit tensor of equal length."""
        self._copies = dict(copies)
        self._prepared = {}

    @property
    def copies(self) -> Mapping[Tensor, Tensor]:
        return self._copies

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            learning = [p for p in group["params"] if p.grad is not None]
            states = [self.state[p] for p in learning]
            if not all(states):
                self._allocate([p for p, state in zip(learning, states, strict=True) if not state])
            if learning:
                _apply(self._runs(number, learning, states), _settings(group))
        return loss

    def _runs(self, number: int, learning: Sequence[Tensor], states: Sequence[Any]) -> list[Shard]:
        marks = [_mark(p, state) for p, state in zip(learning, states, strict=True)]
        if self._copies:
            marks += [_place(self._copies.get(p)) for p in learning]
        steps = [state["step"] for state in states]
        # Adding a tensor is faster than adding a number.
        if all(step.is_cpu for step in steps):
            torch.ops.aten._foreach_add_.Tensor(steps, torch.ones(()), alpha=1.0)
        else:
            torch.ops.aten._foreach_add_.Scalar(steps, 1)
        values = [step.item() for step in steps]
        # Joining is slow, so it is repeated only if tensors or step counts have changed.
        prepared = self._prepared.get(number)
        if prepared is None or prepared.next != values or prepared.marks != marks:
            shards = [self._shard(p, int(value)) for p, value in zip(learning, values, strict=True)]
            prepared = self._prepared[number] = _Prepared(marks, values, runs(shards))
        prepared.next = [value + 1 for value in values]
        return [replace(run, step=int(values[first])) for first, run in prepared.runs]

    def _allocate(self, new: Sequence[Tensor]) -> None:
        for device in {p.device for p in new}:
            here = [p for p in new if p.device == device]
            sizes = [p.numel() for p in here]
            moments, squares = (torch.zeros(sum(sizes), device=device).split(sizes) for _ in range(2))
            for p, moment, square in zip(here, moments, squares, strict=True):
                self.state[p].update(step=torch.tensor(0.0), exp_avg=moment.view_as(p), exp_avg_sq=square.view_as(p))

    def _shard(self, p: Tensor, step: int) -> Shard:
        state = self.state[p]
        gradient = p.grad
        assert gradient is not None
        moment = state["exp_avg"]
        square = state["exp_avg_sq"]
        return Shard(p.detach(), gradient, moment, square, self._copies.get(p), step)


def _mark(p: Tensor, state: Mapping[str, Tensor]) -> tuple[Any, ...]:
    gradient: Any = p.grad
    moment, square = state["exp_avg"], state["exp_avg_sq"]
    return (
        *(p.data_ptr(), p.shape, gradient.data_ptr(), gradient.shape, gradient.stride(), gradient.dtype),
        *(moment.data_ptr(), square.data_ptr()),
    )


def _place(copy: Tensor | None) -> tuple[Any, ...]:
    return () if copy is None else (copy.data_ptr(), copy.shape, copy.dtype)


def refuse_amsgrad(group: Mapping[str, Any]) -> None:
    if group.get("amsgrad"):
        raise _refused("a parameter group has amsgrad=True", "use torch.optim.AdamW")


def _settings(group: Mapping[str, Any]) -> AdamWSettings:
    refuse_amsgrad(group)
    first, second = (float(beta) for beta in group["betas"])
    return AdamWSettings(float(group["lr"]), (first, second), group["eps"], group["weight_decay"], group["maximize"])


def _refused(what: str, remedy: str) -> Unsupported:
    return Unsupported(what, where="adamw", remedy=remedy)


def _check(shard: Shard) -> None:
    kept = dict(zip(("weight", "gradient", "moment", "square", "copy"), shard.tensors(), strict=False))
    for name, tensor in kept.items():
        allowed = (torch.bfloat16, torch.float16) if name == "copy" else (torch.float32,)
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.dtype not in allowed:
            raise _refused(
                f"{name} of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}",
                "pass 1-D contiguous tensors in fp32 (copies in bf16 or fp16), or use torch.optim.AdamW",
            )
        if tensor.numel() != shard.weight.numel():
            raise _refused(
                f"{name} has {tensor.numel()} elements, but its weight has {shard.weight.numel()}",
                "give all tensors of one parameter the same length",
            )
    require_one_device("adamw", kept)


def _follows(first: Shard, second: Shard) -> bool:
    if first.step != second.step or (first.copy is None) != (second.copy is None):
        return False
    return all(
        a.dtype == b.dtype
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in zip(first.tensors(), second.tensors(), strict=True)
    )


def _join(run: Sequence[Shard]) -> Shard:
    if len(run) == 1:
        return run[0]
    size = sum(shard.weight.numel() for shard in run)
    weight, gradient, moment, square, *copy = (x.as_strided((size,), (1,)) for x in run[0].tensors())
    return Shard(weight, gradient, moment, square, copy[0] if copy else None, run[0].step)
