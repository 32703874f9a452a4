"""Run a benchmark and keep what it prints: a dated file in benchmarks/results, with the machine and the command.

    python -m benchmarks.record step one --rounds 15

The file says what anybody needs to compare with it or to run it again. It is written however the benchmark ends, with
its exit code; one that does not end by 0 prints a WRONG line or a missed target, which is worth keeping.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def machine() -> str:
    """Return this machine in words."""
    found = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in _lines(found) if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]).splitlines()
    return f"{names[0] if names else platform.processor()}, {cores} cores" + "".join(f", {gpu}" for gpu in gpus)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _said(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def circumstances(command: Sequence[str]) -> dict[str, str]:
    """Return what numbers depend on, as of now."""
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine(),
        "load when it began": f"{os.getloadavg()[0]:.1f}",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, hydragraph {version('hydragraph')}",
        "commit": _said(["git", "describe", "--always", "--dirty"]) or "unknown",
        # The path of this interpreter is useless on other machines.
        "command": f"`{shlex.join('python' if each == sys.executable else each for each in command)}`",
    }


def record(title: str, command: Sequence[str], folder: Path = RESULTS) -> Path:
    """Run a command, print what it prints, and write that with its circumstances; return the file."""
    around = circumstances(command)  # before the benchmark loads the machine
    environment = {**os.environ, "COLUMNS": "150", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    around["exit code"] = str(running.returncode)
    table = "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in around.items())
    day, _, clock = around["date"].removesuffix(" UTC").partition(" ")
    file = folder / f"{day}-{clock.replace(':', '')}-{title}.md"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# {title}\n\n{table}\n```\n{''.join(lines).rstrip()}\n```\n")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted(p.stem for p in HERE.glob("*.py") if p.stem != "record")
    parser.add_argument("name", choices=names)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    chosen = parser.parse_args()
    print(record(chosen.name, [sys.executable, "-m", f"benchmarks.{chosen.name}", *chosen.arguments]))


if __name__ == "__main__":
    main()
