"""Changes to a compiled folder's graphs with a valid new signature: each is refused, or changes no bit of results.

python -m tests.frontend.compiled_folder.struck --count 500 --seed 7
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.frontend.compiled_folder.load import load
from hydragraph.passes import variants as kept
from tests.frontend.compiled_folder.folders import edit, written
from tests.models import captured, llama, sequences

STRATEGY = "<[0]x2>"
# Numbers close to typical ones, and unexpected ones.
_NUMBERS = (0, 1, -1, 2, 3, 1 << 40)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the leaves of some data are."""
    if isinstance(data, (dict, list)) and data:
        items = data.items() if isinstance(data, dict) else enumerate(data)
        for key, value in items:
            yield from places(value, (*path, key))
    elif path:
        yield path


def strike(data: Any, generator: random.Random) -> str:
    """Change one leaf of a graph's data, and say which."""
    graphs = data["graphs"]["graphs"]
    graph = generator.randrange(len(graphs))
    path = generator.choice(list(places(graphs[graph])))
    within = graphs[graph]
    for key in path[:-1]:
        within = within[key]
    before = within[path[-1]]
    within[path[-1]] = _other(before, graphs[graph], generator)
    return f"graph {graph}, {list(path)}: {before!r:.60} -> {within[path[-1]]!r:.60}"


def _other(value: Any, nodes: list[list[Any]], generator: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return generator.choice([each for each in (*_NUMBERS, value + 1, value - 1) if each != value])
    if isinstance(value, float):
        return generator.choice((value * 2, -value, 0.0))
    names = [node[0] for node in nodes]
    if value in names:
        return generator.choice(names)
    targets = sorted({node[2] for node in nodes if isinstance(node[2], str)})
    return generator.choice(targets) if value in targets else f"{value}x"


def outcome(folder: Path, check: str = "full") -> dict[str, Tensor]:
    """Train a step from a folder, which "full" does not believe, and return what the weights are then."""
    kept._shared.clear()
    model = llama(layers=2)
    factory = lambda named: torch.optim.AdamW(named, lr=1e-2)  # noqa: E731
    executable = hg.compile(model, STRATEGY, factory, device="cpu", compiled=folder, check=check)
    try:
        executable.step(sequences([7, 5, 11], seed=1))
        return executable.full_state_dict()
    finally:
        executable.close()


def struck(folder: Path, seed: int, expected: dict[str, Tensor]) -> str:
    """Change one leaf of a copy of a folder, and say what came of it: "refused: ...", "the same", or else."""
    generator = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        copied = Path(name) / "folder"
        shutil.copytree(folder, copied)
        file = generator.choice(sorted({entry.file for entry in load(folder).manifest.variants.values()}))
        said: list[str] = []
        edit(copied, file, lambda data: said.append(strike(data, generator)))
        try:
            found = outcome(copied)
        except ValueError as error:  # Refused and Unsupported, which name what is wrong
            return f"refused: {file}, {said[0]}: {str(error)[:160]}"
        except Exception as error:  # what nobody foresaw
            return f"{type(error).__name__}: {file}, {said[0]}: {str(error)[:160]}"
    same = found.keys() == expected.keys() and all(torch.equal(found[each], expected[each]) for each in expected)
    return "the same" if same else f"wrong: {file}, {said[0]}"


def main() -> None:
    """Strike as often as is asked for, and print what was neither refused nor harmless."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "folder"
        program, model = captured("llama")
        written(folder, model, program, STRATEGY, ranks=1)
        expected = copy.deepcopy(outcome(folder))
        found: dict[str, int] = {}
        for seed in range(asked.seed, asked.seed + asked.count):
            line = struck(folder, seed, expected)
            kind = line.partition(":")[0]
            found[kind] = found.get(kind, 0) + 1
            if kind not in ("refused", "the same"):
                print(seed, line, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
