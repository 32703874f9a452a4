"""Tested versions of PyTorch."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch.torch_version import TorchVersion

from hydragraph.errors import Unsupported

TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

_LOG = logging.getLogger(__name__)


@functools.cache
def check_torch(version: str = str(torch.__version__)) -> None:
    """Warn once, on one rank, if the PyTorch version is untested; raise Unsupported if it is too old."""
    release = ".".join(version.split(".")[:2])
    if release in TESTED:
        return
    if TorchVersion(version) < TESTED[0]:
        remedy = f"install torch>={TESTED[0]}: graphs from older versions are valid for only one number of tokens"
        raise Unsupported(f"version {version}", where="PyTorch", remedy=remedy)
    if os.environ.get("RANK", "0") == "0":
        _LOG.warning(
            "hydragraph is untested with PyTorch %s (tested: %s to %s): "
            "run `hydragraph verify` to compare with one device",
            *(version, TESTED[0], TESTED[-1]),
        )
