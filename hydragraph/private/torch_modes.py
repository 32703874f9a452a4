"""Isolation from the PyTorch modes of the caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hydragraph.errors import Unsupported


@contextmanager
def own_modes(where: str) -> Iterator[None]:
    """Ignore the caller's modes in this context: compute gradients even under `no_grad` and `inference_mode`.

    Raises:
        Unsupported: under autocast, or with a default dtype other than float32.
    """
    device = torch.get_default_device()
    for kind in dict.fromkeys(("cpu", "cuda", device.type)):
        if kind != "meta" and torch.is_autocast_enabled(kind):
            what = f"the call is inside torch.autocast for {torch.get_autocast_dtype(kind)}"
            remedy = "move the call outside of autocast, and pass dtype= to choose the dtype of the computation"
            raise Unsupported(what, where=where, remedy=remedy)
    if torch.get_default_dtype() is not torch.float32:
        remedy = "call torch.set_default_dtype(torch.float32) after building the model, and pass dtype="
        raise Unsupported(f"torch's default dtype is {torch.get_default_dtype()}", where=where, remedy=remedy)
    with ExitStack() as modes:
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            modes.enter_context(torch.enable_grad())
        if device.type != "cpu":
            modes.enter_context(torch.device("cpu"))
        yield


def untouched() -> bool:
    modes = torch.is_inference_mode_enabled() or not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    return not modes and torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
