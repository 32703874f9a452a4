"""Inductor's compiled code, which may travel with a compiled folder: the one file of it that is code.

PyTorch packs what it has in its cache, kernels among them, into one file, and unpacks it elsewhere. Whoever can write
that file can run code where it is loaded, so it is written and loaded only where the user says `--trust`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

FILE = "inductor.bin"
_LOG = logging.getLogger(__name__)


def write_code(folder: Path) -> bool:
    """Write what this process has compiled by Inductor, or found in its cache; say whether there was anything."""
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is None:
        return False
    (folder / FILE).write_bytes(artifacts[0])
    _LOG.info("wrote Inductor's code to %s, %d bytes", folder / FILE, len(artifacts[0]))
    return True


def load_code(content: bytes, folder: Path) -> None:
    """Put code of a folder that is trusted into Inductor's cache, where compiling finds it."""
    if torch.compiler.load_cache_artifacts(content) is None:
        _LOG.warning("PyTorch could not read %s: Inductor compiles anew", folder / FILE)
        return
    _LOG.info("loaded Inductor's code from %s", folder / FILE)
