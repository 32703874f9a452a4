"""Environment variables of ranks that compute on a GPU."""

from __future__ import annotations

import pytest

from hydragraph.cluster.processes.cuda_environment import set_cuda_environment


def test_survivors_go_on_streams_have_queues_and_segments_grow() -> None:
    environment: dict[str, str] = {}
    set_cuda_environment(environment)
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
@pytest.mark.parametrize(("value", "warned"), [("0", False), ("1", True), ("2", False), ("3", True)])
def test_what_the_user_has_set_stays(name: str, value: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    chosen = {name: value, "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    environment = chosen.copy()
    set_cuda_environment(environment)
    assert environment == chosen
    assert (f"{name}={value} lets PyTorch end this process" in caplog.text) == warned
