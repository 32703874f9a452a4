"""Register and stack usage of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class ThreadResources:
    """Resources per thread; without local arrays, the stack holds only spilled registers."""

    registers: int
    stack_bytes: int


def usage(cubin: bytes) -> ThreadResources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return ThreadResources(numbers["REG"], numbers["STACK"])


@cache
def _cuobjdump() -> str:
    import triton

    shipped = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return str(shipped) if shipped.exists() else "cuobjdump"
