"""Environment variables of CUDA, PyTorch's allocator and NCCL."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

_LOG = logging.getLogger(__name__)

# PyTorch reads the first that is set.
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_NO_HANDLING = "0"
_CLEAN_UP_ONLY = "2"
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_cuda_environment(environment: MutableMapping[str, str]) -> None:
    """Set a rank's variables unless the user has set them; warn about harmful values.

    - `TORCH_NCCL_ASYNC_ERROR_HANDLING=0`: by default (3), PyTorch ends a process as soon as NCCL loses a peer. Only at
      0 may the watch abort communicators (`torch.distributed.distributed_c10d._abort_process_group`).
    - `CUDA_DEVICE_MAX_CONNECTIONS=32`: by default (8), streams share hardware queues and wait for each other.
    - `PYTORCH_ALLOC_CONF=expandable_segments:True`: otherwise micro-batches of different sizes fragment the memory.
    """
    chosen = next((name for name in _ERROR_HANDLING if name in environment), None)
    if chosen is None:
        environment[_ERROR_HANDLING[0]] = _NO_HANDLING
    elif environment[chosen] not in (_NO_HANDLING, _CLEAN_UP_ONLY):
        _LOG.warning(
            "%s=%s lets PyTorch end this process when another rank is lost, so an elastic run cannot continue and no "
            "error names the lost rank: unset it, or set it to %s",
            chosen,
            environment[chosen],
            _NO_HANDLING,
        )
    environment.setdefault(_CONNECTIONS, "32")
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"
