"""What the tests of verbs share: a tiny run's YAML file, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from hydragraph import cli
from tests.train.plain import settings

# An environment variable: ranks draw their losses only if it is set, because it takes longer than their steps.
DRAWN = "HYDRAGRAPH_TESTS_DRAW"
LOPSIDED = ["<[0]x1,[1]x1>", "<[0,1]x2>"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**settings(folder), **changes}))
    return file


def computed(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is measured, which no two runs have alike."""
    return {name: value for name, value in metrics.items() if not name.endswith(("_s", "seconds", "_bytes", "time"))}
