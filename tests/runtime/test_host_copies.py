"""Copies in host memory: what comes back has the bytes, sizes, strides and shared storages of the original."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from hydragraph.passes import offload
from hydragraph.runtime.host_copies import copy_to_host, storage_address

CPU = torch.device("cpu")


def there_and_back(saved: list[object], *staying: Tensor) -> tuple[list[object], int]:
    """Return what comes back, and the number of storages that were copied."""
    host = copy_to_host(saved, {storage_address(tensor) for tensor in staying})
    assert all(not there.is_cuda and there.dim() == 1 for there in host.storages.values())
    return host.fetch(host.room(CPU)), len(host.storages)


def test_views_of_one_storage_come_back_as_views_of_one() -> None:
    whole = torch.randn(64, 3, 512)
    views = [whole[:, 0], whole[:, 1].transpose(0, 1), whole.view(torch.int32)[1:]]
    back, copied = there_and_back([*views, 7, None])
    assert copied == 2  # one for each dtype
    assert back[3:] == [7, None]
    for view, returned in zip(views, back, strict=False):
        assert isinstance(returned, Tensor)
        assert torch.equal(view, returned)
        assert (view.size(), view.stride(), view.dtype) == (returned.size(), returned.stride(), returned.dtype)
        assert storage_address(view) != storage_address(returned)
    assert storage_address(back[0]) == storage_address(back[1])  # pyrefly: ignore[bad-argument-type]


def test_small_tensors_and_named_storages_stay() -> None:
    small, large, weight = torch.zeros(offload.SMALL_BYTES // 4), torch.ones(1 << 16), torch.ones(1 << 16)
    back, copied = there_and_back([small, large, weight.view(256, 256).t()], weight)
    assert copied == 1
    assert back[0] is small
    assert storage_address(back[2]) == storage_address(weight)  # pyrefly: ignore[bad-argument-type]


def test_an_empty_tensor_stays() -> None:
    with mock.patch.object(offload, "SMALL_BYTES", 0):
        empty = torch.empty(0)
        assert there_and_back([empty])[0][0] is empty
