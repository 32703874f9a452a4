"""Another process compiles the planner's search, if it has to be compiled, and always ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hydragraph.planner import first_compilation
from hydragraph.planner.first_compilation import VARYING, FirstCompilation, compile_searches
from tests.thorough import thorough


def test_what_is_compiled_is_not_compiled_again() -> None:
    compile_searches(varying=True)  # compiles what `make plans` has not
    with FirstCompilation(varying=True) as compilation:
        assert compilation.ended
        compilation.wait(None)


def test_it_ends_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_compilation, "is_compiled", lambda _: False)
    with FirstCompilation(varying=False) as compilation:
        assert not compilation.ended
        began = time.monotonic()
        compilation.wait(0.1)
        assert time.monotonic() - began < 5
        assert compilation.ended
    with pytest.raises(RuntimeError, match="a mistake elsewhere"), FirstCompilation(varying=False) as compilation:
        raise RuntimeError("a mistake elsewhere")
    assert compilation.ended


PLANS = """
import logging
import sys
from numba.core import event
from hydragraph.planner.first_compilation import FirstCompilation, compile_searches
varying = sys.argv[1:] == ["--varying"]
with FirstCompilation(varying) as compilation:
    print("compiled before:", compilation.ended)
with event.install_recorder("numba:compile") as recorder:
    compile_searches(varying)
print("compiled here:", len(recorder.buffer))
"""


@thorough  # it compiles everything
@pytest.mark.parametrize("varying", [False, True])
def test_a_later_process_compiles_nothing(varying: bool, tmp_path: Path) -> None:
    given = [VARYING] if varying else []
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-m", first_compilation.__name__, *given], check=True, env=environment)
    run = [sys.executable, "-c", PLANS, *given]
    said = subprocess.run(run, check=True, env=environment, capture_output=True, text=True).stdout
    assert said.split("\n")[:2] == ["compiled before: True", "compiled here: 0"]
