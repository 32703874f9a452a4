"""Commands answer mistakes in their files and texts before they import PyTorch or the planner's search."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.commands.tiny import write
from tests.cost import priced

RUN = """
import json, sys
from typer.testing import CliRunner
from hydragraph import cli
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 2, (words, done.output)
    slow = {"torch", "numba", "scipy"} & set(sys.modules)
    assert not slow, (words, slow)
    print(done.stderr.splitlines()[0].removeprefix("hydragraph: "))
"""


def test_mistakes_are_answered_before_slow_imports(tmp_path: Path) -> None:
    config = str(write(tmp_path))
    priced.mixed().save(tmp_path / "cluster.yaml")
    priced.profile(2).save(tmp_path / "profile.json")
    (tmp_path / "lengths.txt").write_text("40\n")
    profile, lengths = ["--profile", str(tmp_path / "profile.json")], ["--lengths", str(tmp_path / "lengths.txt")]
    lost = tmp_path / "lost.yaml"
    lost.write_text(str(dict.fromkeys(range(4), ".inf")).replace("'", ""))
    devices = ["plan", "--cluster", str(tmp_path / "cluster.yaml"), "--model", config]
    equal = ["plan", "--devices", "8", "--context", "600"]
    missing = "no.file: the file or directory does not exist"
    layers = "strategy text: this pipeline's stages have 3 layers, but the model has 2"
    cases = [
        *([*devices, name, "no.file"] for name in ("--profile", "--lengths", "--corrections", "--health")),
        *([*equal, *given, name, "no.file"] for given, name in ((profile, "--lengths"), (lengths, "--profile"))),
        [*equal, *profile, *lengths, "--corrections", "no.file"],
        *(
            [verb, config, name, "no.file"]
            for verb in ("simulate", "check")
            for name in ("--cluster", "--profile", "--lengths", "--corrections")
        ),
        ["simulate", config, "--health", "no.file"],
        ["report", config, "--corrections", "no.file"],
    ]
    expected = [missing] * len(cases)
    for words, sentence in (
        ([*devices, "--method", "best"], "'method' is 'best'"),
        ([*devices, "--running", "<[0]x3>"], f"--running: {layers}"),
        ([*devices, "--home", "1,2"], "home '1,2': 'shares' has 2 numbers"),
        ([*devices, "--health", str(lost)], "lost.yaml: all devices are lost: give at least one rank a finite rate"),
        ([*devices, "--efficiency", "2"], "--efficiency 2: give a fraction"),
        ([*devices, "--price", "1", "--budget", "0"], "--budget 0: the cheapest node costs $2"),
        ([*equal, *profile, *lengths, "--strategy", "<tp3"], "--strategy 0: strategy text: expected ','"),
        (["simulate", config, "--home", "1,2"], "home '1,2': 'shares' has 2 numbers"),
        (["simulate", config, "--what-if", "device 9 x2"], "'device 9 x2': use one of the cluster's ranks"),
        (["check", config, "--arch", "x"], "unknown --arch x"),
        (["plan", "--cluster", "no.yaml", "--model", config], "no.yaml"),
        *(
            ([verb, config, "--strategy", "<[0]x3>"], f"strategies[0]: {layers}")
            for verb in ("simulate", "check", "report", "show", "verify")
        ),
        *(([verb, config, "--set", "strategies=<[0]x3>"], f"strategies[0]: {layers}") for verb in ("profile", "train")),
    ):
        cases.append(words)
        expected.append(sentence)
    code = [sys.executable, "-c", RUN, json.dumps(cases)]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [line for sentence, line in zip(expected, said, strict=True) if sentence not in line] == []
