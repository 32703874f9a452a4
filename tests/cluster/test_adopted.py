"""A default process group that the user made, and which backend moves tensors."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hydragraph.cluster.adopted import backend_of, gpu_name
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join, launch
from hydragraph.cluster.processes.rendezvous_stores import client
from tests.cluster.test_communicators import TIMEOUT


def of_the_user(backend: str) -> tuple[list[int], str, bool]:
    """Adopt a default group whose backend moves CUDA tensors only, or that is bound to a device."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # destroying the group closes connections that the other rank may still be making
    dist.destroy_process_group()
    if backend == "gpu-only":
        dist.Backend.register_backend(backend, dist.ProcessGroupGloo, devices=["cuda"])
    store = dist.PrefixStore("user", client(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    default = dist.group.WORLD
    assert isinstance(default, ProcessGroup)
    if backend == "gloo":  # as `device_id=` would
        default.bound_device_id = torch.device("cuda:1")
    for _ in "ab":  # a second `join` uses the same group for objects
        world = join("cpu")
    groups = Groups(world, TIMEOUT)
    assert groups.tell(rank) == 0
    assert all(group.bound_device_id is None for group in groups._all())
    bound = default.bound_device_id == torch.device("cuda:1")
    made = "" if world.objects is None else str(dist.get_backend(world.objects))
    gathered = world.gather(10 * rank)
    groups.close()
    return gathered, made, bound


@pytest.mark.parametrize(("backend", "made", "bound"), [("gpu-only", "gloo", False), ("gloo", "", True)])
def test_a_users_group_serves_as_far_as_it_can(backend: str, made: str, bound: bool) -> None:
    assert launch(of_the_user, 2, backend) == [([0, 10], made, bound)] * 2


def of_nobody() -> str:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    with pytest.raises(ValueError, match="the backend 'fake', whose operations transfer no data"):
        join("cpu")
    dist.destroy_process_group()
    return "refused"


def test_a_group_that_moves_nothing_is_refused() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers it

    assert launch(of_nobody, 1) == ["refused"]


def test_nccl_moves_tensors_where_every_rank_has_a_gpu_of_its_own() -> None:
    assert backend_of(["a", "b", "c"]) == "nccl"
    assert backend_of(["a", "b", "a"]) == "gloo"  # two ranks survive on one GPU
    assert backend_of(["a", None]) == "gloo"
    assert gpu_name(torch.device("cpu")) is None
