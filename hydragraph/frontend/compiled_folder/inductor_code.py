"""Inductor's code in a compiled folder, written and loaded only with `--trust`."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from hydragraph.private.absent_gpu import share_cache

FILE = "inductor.bin"
_LOG = logging.getLogger(__name__)


def write_code(folder: Path) -> bool:
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return False
    (folder / FILE).write_bytes(artifacts[0])
    _LOG.info("wrote Inductor's code to %s, %d bytes", folder / FILE, len(artifacts[0]))
    return True


def load_code(content: bytes, folder: Path, arch: str | None = None) -> None:
    """Put a trusted folder's code into Inductor's cache.

    Args:
        arch: GPU architecture, such as sm_90, if the code was compiled without a GPU.
    """
    if arch is not None:
        share_cache(arch)
    if torch.compiler.load_cache_artifacts(content) is None:
        _LOG.warning("PyTorch could not read %s: Inductor will compile the graphs again", folder / FILE)
        return
    _LOG.info("loaded Inductor's code from %s", folder / FILE)
