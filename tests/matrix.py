"""The core of the suite with each PyTorch that is supported: `make matrix`, or `python -m tests.matrix [NAME ...]`.

Every row makes an environment of its own (about 5 GB for a CUDA build, which needs no GPU), installs this package with
the versions of the row, runs what depends on them, trains the demo for three steps, and removes the environment. The
table goes to README. A row whose interpreter or wheels cannot be had says so, and the exit code is 1 for what failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FOLDER = ROOT / "build" / "matrix"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"

# Tests that depend on PyTorch's version: capture, passes, processes, parity; the demo runs after them.
_PASSES = ("prove_sizes", "annotate", "shard", "differentiate", "accumulate", "clean", "fuse_head", "written_in_place")
CORE = (
    *("tests/private", "tests/ir/test_graph_data.py", *(f"tests/passes/test_{name}.py" for name in _PASSES)),
    *("tests/frontend/test_capture.py", "tests/frontend/test_templates.py", "tests/frontend/test_mask_patterns.py"),
    *(
        "tests/runtime/test_executor.py",
        "tests/cluster/test_launch.py",
        "tests/cluster/processes/test_shared_preparation.py",
    ),
    "tests/test_parity.py",
)
DEMO = ("train", "examples/demo.yaml", "--overwrite", "--set", "steps=3", "--set", "evaluate_every=3")


@dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        torch: its release; "2.13.0+cpu" is the CPU build, else what the package index has: on Linux a CUDA build.
        python: the minor release of the interpreter.
        oldest: every other dependency also at the lowest version that pyproject.toml admits.
    """

    torch: str
    python: str
    oldest: bool = False

    @property
    def name(self) -> str:
        """Return what it is called on the command line."""
        return self.torch + ("-oldest" if self.oldest else "")

    @property
    def requirement(self) -> str:
        """Return what pip is asked for; `===` does not take a CPU build for the other."""
        return f"torch{'==' if '+' in self.torch else '==='}{self.torch}"


ROWS = (
    Row("2.11.0", "3.11", oldest=True),
    Row("2.11.0", "3.12"),
    Row("2.12.0", "3.11"),
    Row("2.13.0+cpu", "3.11"),
    Row("2.13.0", "3.11"),
    Row("2.14.1", "3.13"),
    Row("2.15.0", "3.13"),
)


@dataclass(frozen=True)
class Result:
    """What became of a row: "passed", or what did not."""

    row: Row
    versions: str
    outcome: str
    seconds: float


def main() -> int:
    """Run the rows that the command line names, or all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("rows", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument(
        "--keep", action="store_true", help=f"leave the environments in {FOLDER.relative_to(ROOT)}, for the next time"
    )
    given = parser.parse_args()
    if unknown := set(given.rows) - set(names):
        parser.error(f"unknown row {', '.join(sorted(unknown))}: use {', '.join(names)}")
    console = Console()
    results = []
    for row in ROWS:
        if row.name in given.rows or not given.rows:
            with console.status(f"torch {row.name}, Python {row.python}"):
                results.append(_run(row, given.keep))
            console.print(f"{row.name}: {results[-1].outcome} ({results[-1].seconds / 60:.0f} min)")
            _write(results)
    console.print(_table(results))
    return int(any(result.outcome.startswith("FAILED") for result in results))


def _run(row: Row, keep: bool) -> Result:
    began, home = time.monotonic(), FOLDER / row.name
    versions, outcome = f"{row.torch} | | ", "not run: there is no " + f"python{row.python}"
    try:
        interpreter = find_python(row.python)
        if interpreter is not None:
            outcome = _install(row, interpreter, home) or _test(home)
            versions = _versions(home) or f"{row.torch} | | "
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)
    return Result(row, versions, outcome, time.monotonic() - began)


def find_python(release: str) -> str | None:
    """Return an interpreter of a minor release: this one, one on the path, or one of pyenv's."""
    found = [sys.executable, shutil.which(f"python{release}")]
    found += sorted(map(str, Path("~/.pyenv/versions").expanduser().glob(f"{release}.*/bin/python")))
    says = "import sys; print('%d.%d' % sys.version_info[:2])"
    for each in filter(None, found):
        said = subprocess.run([each, "-c", says], capture_output=True, text=True, check=False)
        if said.stdout.strip() == release:
            return each
    return None


def _install(row: Row, interpreter: str, home: Path) -> str | None:
    """Make the environment, unless it was kept; return why it cannot be had."""
    stamp, wanted = home / "complete", repr(row) + (ROOT / "pyproject.toml").read_text()
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", home], check=True)
    pip = [home / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-compile"]
    lowest = list(oldest_requirements((ROOT / "pyproject.toml").read_text())) if row.oldest else []
    for asked in ([row.requirement], [*lowest, row.requirement, "-e", f"{ROOT}[dev]"]):
        said = subprocess.run([*pip, *asked], capture_output=True, text=True, check=False)
        if said.returncode:
            lines = [line for line in said.stderr.splitlines() if line.startswith("ERROR")] or ["pip failed"]
            return f"not run: {lines[-1].removeprefix('ERROR: ')}"
    subprocess.run([home / "bin" / "python", "-m", "compileall", "-qq", "-j", "0", home / "lib"], check=False)
    stamp.write_text(wanted)
    return None


def oldest_requirements(project: str) -> Iterator[str]:
    """Yield the dependencies of a pyproject.toml but PyTorch, each pinned to the lowest release that it admits."""
    for requirement in tomllib.loads(project)["project"]["dependencies"]:
        name, lowest = requirement.split(">=")
        if name != "torch":
            yield f"{name}=={lowest}.*" if lowest.count(".") < 2 else f"{name}=={lowest}"


def _test(home: Path) -> str:
    """Run the core and the demo; return "passed", or the first line of what failed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    tests = [home / "bin" / "python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", *CORE]
    tests += ["--deselect", "tests/private/test_versions.py::test_readme_has_the_table"]  # which this is about to write
    demo = [home / "bin" / "hydragraph", *DEMO, "--set", f"output={home / 'demo'}"]
    for what, command in (("tests", tests), ("demo", demo)):
        log = FOLDER / f"{home.name}-{what}.txt"
        with log.open("w") as file:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if code:
            failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", log.read_text(), re.MULTILINE)
            return f"FAILED {what}: {', '.join(failed[:3]) or 'exit code ' + str(code)}; see {log.relative_to(ROOT)}"
    return "passed"


def _versions(home: Path) -> str:
    says = "import numpy, torch, transformers as t; print(*(m.__version__ for m in (torch, t, numpy)), sep=' | ')"
    said = subprocess.run([home / "bin" / "python", "-c", says], capture_output=True, text=True, check=False)
    return said.stdout.strip()


def _table(results: Sequence[Result]) -> Table:
    table = Table("torch", "transformers", "numpy", "Python", "outcome", "minutes")
    for result in results:
        told = result.versions.split(" | ")
        table.add_row(*told, result.row.python, result.outcome, f"{result.seconds / 60:.0f}")
    return table


def _write(results: Sequence[Result]) -> None:
    """Put rows into README's table; those that did not run this time stay as they are."""
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    ran = {result.row: f"| {result.versions} | {result.row.python} | {result.outcome} |" for result in results}
    lines = [
        "| torch | transformers | numpy | Python | version-dependent tests, and the demo |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        known = next((line for line in table.splitlines() if _is_of(row, line)), "")
        lines.append(ran.get(row) or known or f"| {row.torch} | | | {row.python} | not run |")
    README.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def _is_of(row: Row, line: str) -> bool:
    cells = [cell.strip() for cell in line.split("|")]
    return (
        len(cells) > 4
        and cells[1].startswith(row.torch)
        and ("+cpu" in cells[1]) == ("+cpu" in row.torch)
        and cells[4] == row.python
    )


if __name__ == "__main__":
    sys.exit(main())
