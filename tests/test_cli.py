"""The command line: its verbs, and that a mistake is one sentence and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hydragraph.version import __version__
from tests.commands.tiny import run, write


def test_help_lists_the_verbs() -> None:
    words = run("--help").stdout.split()
    verbs = {"train", "check", "verify", "show", "compile", "simulate", "profile", "plan", "bench"}
    assert verbs <= set(words)


def test_as_a_module_it_is_the_same_and_tells_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "hydragraph", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"hydragraph {__version__}"


def test_help_imports_nothing_that_is_slow() -> None:
    code = "import sys, hydragraph.cli; print(sorted({'torch', 'transformers', 'numpy', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "nowhere.yaml"), "nowhere.yaml: there is no such file or directory: correct the path"),
        (("train", "."), ".: a directory, where a file is needed: name the file"),
        (("train", "CONFIG/x"), "below a file, where a directory is needed: correct the path"),
        (("train", sys.executable), "no text in UTF-8: name a YAML file"),
        (("train", "CONFIG", "--set", "optimizer.lrr=1"), "optimizer: unknown field 'lrr': did you mean 'lr'?"),
        (("train", "CONFIG", "--resume"), "to resume from: correct output, or leave --resume out"),
        (("train", "CONFIG", "--resume-from", "last"), "--resume-from 'last': give a checkpoint of the run by its"),
        (("train", "CONFIG", "--set", "output=CONFIG"), "is no directory: choose another output"),
        (("train", "CONFIG", "--resume", "--overwrite"), "give one of them"),
        (("train", "CONFIG", "--set", 'strategies=["<tp2,pp1>"]'), "strategies[0]: pipeline 0, stage 0: unknown rank"),
        (("verify", "CONFIG", "--strategy", "<tp1"), "strategies[0]: strategy text"),
        (("show",), "show needs the YAML file of a run"),
        (("show", "CONFIG", "--strategy", "<tp1,pp1>", "--micro-batches", "1,2"), "--micro-batches '1,2'"),
        (("show", "CONFIG", "--micro-batches", "0"), "--micro-batches '0': nothing would be computed; give some"),
        (("show", "CONFIG", "--micro-batches", "two"), "--micro-batches 'two': give one number, or one for each"),
        (("show", "CONFIG", "--rank", "0"), "--rank 0: ranks run a program under a strategy: give --strategy, too"),
        (("show", "CONFIG", "--strategy", "<tp1,pp1>", "--rank", "1"), "--rank 1: there are ranks 0 to 0"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    config = write(tmp_path)
    result = run(*(argument.replace("CONFIG", str(config)) for argument in arguments))
    assert result.exit_code == 2
    assert "hydragraph: " in result.stderr
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("verb", ["simulate", "plan", "bench kernels"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = (write(tmp_path),) if verb == "simulate" else ()
    result = run(*verb.split(), *config, "--picture", tmp_path / "picture.png")
    assert result.exit_code == 2
    assert result.stderr == "hydragraph: --picture needs matplotlib: pip install matplotlib, or leave it out\n"


def test_tracebacks_come_with_debug(tmp_path: Path) -> None:
    result = run("train", write(tmp_path), "--resume", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
