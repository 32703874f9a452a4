"""The command line: its verbs; that a mistake is one sentence and exit code 2 is in test_bad_inputs.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from hydragraph.cli import _sentences, main
from hydragraph.errors import RankFailure
from hydragraph.train.config import TrainConfig
from hydragraph.version import __version__
from tests.commands.tiny import run, write


def test_help_lists_the_verbs() -> None:
    words = run("--help").stdout.split()
    verbs = {"train", "check", "verify", "show", "compile", "simulate", "profile", "plan", "bench"}
    assert verbs <= set(words)


def test_as_a_module_it_is_the_same_and_tells_its_version() -> None:
    done = subprocess.run([sys.executable, "-m", "hydragraph", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"hydragraph {__version__}"


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hydragraph", "--version"])
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert sys.stdout is not None


@pytest.mark.parametrize("code", ["sys.argv[1:] = ['--version']", "cli.app = lambda: (print('x'), sys.exit(0))"])
def test_an_output_that_cannot_be_written_is_one_sentence(code: str) -> None:
    code = f"import sys; from hydragraph import cli; {code}; from hydragraph.__main__ import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        MemoryError(),
        RankFailure(1, "push", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB."),
        RankFailure(1, "", "killed by signal 9 (SIGKILL), often because the host is out of memory"),
    ],
)
def test_full_memory_has_a_remedy_and_is_no_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), _sentences(debug=False):
        raise error
    said = capsys.readouterr().err
    assert said.endswith(
        ": lower data.max_length, recompute activations (as in <tp1,pp1>r) or use more ranks (see hydragraph check)\n"
    )
    assert "bug" not in said


def test_ctrl_c_during_imports_shows_no_traceback() -> None:
    code = "import os, signal, sys; sys.meta_path.insert(0, type('Typed', (), {'find_spec': lambda name, *_: "
    code += "os.kill(os.getpid(), signal.SIGINT) if name == 'typer' else None})); "
    code += "from hydragraph.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "hydragraph: stopped\n"


def test_the_process_ends_without_a_last_collection() -> None:
    code = "import sys; Told = type('Told', (), {'__del__': lambda _: print('collected')}); told = Told(); "
    code += "told.itself = told; sys.argv[1:] = ['--version']; from hydragraph.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"hydragraph {__version__}\n", "")


def test_a_full_disk_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(TrainConfig, "load", full)
    result = run("check", write(tmp_path))
    assert result.exit_code == 2
    assert result.stderr.endswith("No space left on device: free disk space, or write elsewhere\n")


def test_help_imports_nothing_that_is_slow() -> None:
    code = "import sys, hydragraph.cli; print(sorted({'torch', 'transformers', 'numpy', 'scipy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("verb", ["simulate", "plan", "bench kernels"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_work(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config = (write(tmp_path),) if verb == "simulate" else ()
    result = run(*verb.split(), *config, "--picture", tmp_path / "picture.png")
    assert result.exit_code == 2
    assert result.stderr == "hydragraph: --picture needs matplotlib: pip install matplotlib, or omit --picture\n"


def test_tracebacks_come_with_debug(tmp_path: Path) -> None:
    result = run("train", write(tmp_path), "--resume", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
