"""Processes that run a module of this package."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGE = str(Path(__file__).parents[2])  # folder that contains this package


def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    paths: Sequence[str] = (),
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m module`; its import path includes `paths` but not the current directory."""
    environment = os.environ if environment is None else environment
    every = [PACKAGE, *filter(None, [os.environ.get("PYTHONPATH")]), *filter(None, paths)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(every))},
        **options,
    )
