"""Find a model's repeated blocks and tell which of them are structurally the same."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported

LAYER_INDEX = ("layer_idx", "layer_id", "layer_number")  # attributes that only say where a block stands


class Position(int):
    """A layer index that notices when the model computes with it, so that such layers are not taken for equal."""

    touched: bool = False

    def _note(self) -> int:
        self.touched = True
        return int(self)

    def __add__(self, other: int) -> int:
        return self._note() + other

    def __radd__(self, other: int) -> int:
        return other + self._note()

    def __sub__(self, other: int) -> int:
        return self._note() - other

    def __rsub__(self, other: int) -> int:
        return other - self._note()

    def __neg__(self) -> int:
        return -self._note()

    def __truediv__(self, other: float) -> float:
        return self._note() / other

    def __pow__(self, other: int, modulo: int | None = None) -> int:  # type: ignore[override]
        return pow(self._note(), other, modulo)

    def __bool__(self) -> bool:
        return bool(self._note())

    def __ne__(self, other: object) -> bool:
        return self._note() != other

    def __mul__(self, other: int) -> int:
        return self._note() * other

    def __rmul__(self, other: int) -> int:
        return other * self._note()

    def __mod__(self, other: int) -> int:
        return self._note() % other

    def __floordiv__(self, other: int) -> int:
        return self._note() // other

    def __lt__(self, other: int) -> bool:
        return self._note() < other

    def __le__(self, other: int) -> bool:
        return self._note() <= other

    def __gt__(self, other: int) -> bool:
        return self._note() > other

    def __ge__(self, other: int) -> bool:
        return self._note() >= other

    def __eq__(self, other: object) -> bool:
        return self._note() == other

    def __hash__(self) -> int:
        return hash(int(self))

    def __index__(self) -> int:
        return self._note()

    def __float__(self) -> float:
        return float(self._note())


def meta_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model onto the meta device with floating parameters in `dtype`, copying no weights.

    Tied parameters stay tied; buffers keep their dtype (rotary frequencies stay fp32 under bf16).
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, device="meta", dtype=kind)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name in LAYER_INDEX:
            if type(module.__dict__.get(name)) is int:
                module.__dict__[name] = Position(module.__dict__[name])
    return copied


def block_list(model: nn.Module, path: str | None = None) -> tuple[str, nn.ModuleList]:
    """Return the path and the module list of a model's repeated blocks: the one that holds most parameters.

    Raises:
        Unsupported: there is none, or a block occurs in it twice.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if path is None:
        sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in lists.items() if not _inside(n, lists)}
        path = max(sizes, key=lambda n: sizes[n], default=None)
    if path is None or path not in lists or not any(True for _ in lists[path].parameters()):
        raise Unsupported(
            "no repeated blocks were found" if path is None else f"`{path}` is no nn.ModuleList with parameters",
            where=type(model).__name__,
            remedy="name the nn.ModuleList of the repeated blocks with blocks='path.to.list'",
        )
    found = lists[path]
    if len({id(m) for m in found}) < len(found):
        raise Unsupported(
            "the same block occurs twice (shared blocks)",
            where=path,
            remedy="give every layer its own module (copy.deepcopy)",
        )
    return path, found


def _inside(name: str, lists: Iterable[str]) -> bool:
    return any(name.startswith(other + ".") for other in lists)


def structure(block: nn.Module, identities: dict[int, int]) -> str:
    """Return a key that two blocks share only if they are built alike: classes, attributes, shapes, dtypes.

    Attributes that are neither plain values nor tensors count by identity (`identities` numbers them in order of
    appearance), so that blocks are told apart rather than wrongly merged. A layer's index does not count; a block
    that computes with it is found out later (`Position`).
    """
    parts: list[object] = []
    for name, module in block.named_modules():
        own = vars(module).items()
        plain = [(k, _value(v, identities)) for k, v in own if not k.startswith("_") and k not in LAYER_INDEX]
        parts.append((name, type(module).__module__, type(module).__qualname__, sorted(plain)))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    parts.append([(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in tensors])
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _value(value: object, identities: dict[int, int]) -> str:
    if isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_value(v, identities) for v in value)})"
    if isinstance(value, Tensor):
        return f"tensor {identities.setdefault(id(value), len(identities))}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    return f"object {identities.setdefault(id(value), len(identities))}"


def positions(block: nn.Module) -> list[Position]:
    """Return the noticing layer indices inside a block."""
    held = (module.__dict__.get(name) for module in block.modules() for name in LAYER_INDEX)
    return [p for p in held if isinstance(p, Position)]
