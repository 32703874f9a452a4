"""numba's cache, damaged and unwritable: results are the same, a line reports it, and calls succeed."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest
from numba.core import event

from hydragraph.errors import StillCompiling
from hydragraph.kernels import numba_compiler
from hydragraph.kernels.numba_compiler import compiled, compiled_elsewhere
from tests.thorough import first, thorough

MODULE = """
import logging
from hydragraph.kernels.numba_compiler import compiled
logging.basicConfig(format="%(message)s")

@compiled
def added(a, b):
    return a + b

@compiled
def twice(a, b):
    return 2 * added(a, b)

print(twice(3, 4), *(next(iter(f.stats.cache_hits.values()), 0) for f in (twice,)))
"""
COLD, WARM = "14 0", "14 1"
WAIT = "compiling the planner's search once, which takes up to a minute on one core; it is cached in "


# A process that has imported numba and compiled once, which takes seconds, and forks for each program that it is sent.
FORKS = """
import json, os, runpy, sys
from numba import njit
from numba.core import config
from hydragraph.kernels import numba_compiler
njit(lambda a, b: 2 * (a + b))(3, 4)
for line in sys.stdin:
    file, environment = json.loads(line)
    if not (pid := os.fork()):
        os.environ.update(environment)
        config.reload_config()
        sys.path.insert(0, os.path.dirname(file))
        sys.dont_write_bytecode = True
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(os.path.join(os.path.dirname(file), name), os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        code = 1
        try:
            runpy.run_path(file, run_name="__main__")
            code = 0
        finally:
            if code:
                sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@cache
def forks() -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    server = subprocess.Popen(
        [sys.executable, "-c", FORKS], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def call(folder: Path, file: str = "module.py", **environment: str) -> tuple[str, list[str]]:
    """Run the module in a new process; return what it printed, and its lines on stderr."""
    module = folder / "module.py"
    if not module.exists():
        module.write_text(MODULE)
    stdin, stdout = forks().stdin, forks().stdout
    assert stdin is not None
    assert stdout is not None
    given = {"NUMBA_CACHE_DIR": str(folder / "cache"), "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"], **environment}
    print(json.dumps([str(folder / file), given]), file=stdin, flush=True)
    code = stdout.readline()
    printed, said = ((folder / name).read_text() for name in ("stdout", "stderr"))
    assert code == "0\n", said
    return printed.strip(), said.splitlines()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache is filled."""
    folder = tmp_path_factory.mktemp("warm")
    printed, lines = call(folder)
    assert printed == COLD
    assert [line.startswith(f"{WAIT}{folder / 'cache'}") for line in lines] == [True]
    return folder


@thorough
@pytest.mark.parametrize(
    ("how", "suffix"),
    first([("truncated", "nbi"), ("a bit", "nbc")], product(["empty", "truncated", "a bit"], ["nbi", "nbc"])),
)
def test_what_is_damaged_is_compiled_again_and_kept(how: str, suffix: str, warm: Path) -> None:
    files = [*(warm / "cache").rglob(f"*.{suffix}")]
    assert {file.name.partition("-")[0] for file in files} == {"module.twice"}  # what only it calls is inside it
    file = max(files, key=lambda each: each.stat().st_mtime_ns)  # code that was compiled again has another name
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if suffix == "nbc" else 1] ^= 255
    file.write_bytes({"empty": b"", "truncated": data[:-9], "a bit": bytes(data)}[how])
    printed, lines = call(warm)
    assert printed == COLD
    assert [line.split(" in ")[0] for line in lines] == ["numba's cache"]
    assert lines[0].endswith("compiling again")
    assert call(warm) == (WARM, [])


def test_equal_files_share_what_is_compiled_and_other_versions_keep_theirs(tmp_path: Path) -> None:
    home = {"NUMBA_CACHE_DIR": "", "XDG_CACHE_HOME": str(tmp_path / "home")}
    one, two, other = folders = [tmp_path / "one", tmp_path / "two", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    (other / "module.py").write_text(MODULE.replace("2 * added(a, b)", "added(added(a, b), added(a, b))"))
    assert [call(folder, **home)[0] for folder in (one, other)] == [COLD, COLD]
    assert [call(folder, **home) for folder in (two, other)] == [(WARM, [])] * 2
    assert {path.parent for path in tmp_path.rglob("*.nbc")} == {tmp_path / "home" / "hydragraph" / "compiled"}


def test_code_that_installation_compiled_is_read_first(warm: Path, tmp_path: Path) -> None:
    installed = f"numba_compiler._INSTALLED = __import__('pathlib').Path({str(warm / 'cache')!r})\n"
    imported = "from hydragraph.kernels import numba_compiler\n" + installed
    # The module's folder names numba's, and its file the stamp.
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "start.py").write_text(imported + "import module\n")
    assert call(tmp_path, file="start.py") == (WARM, [])
    assert not [*(tmp_path / "cache").rglob("*.nb?")]


def test_the_oldest_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_compiler, "_MOST", 8)
    for at in range(9):
        (tmp_path / f"{at}.nbc").touch()
        os.utime(tmp_path / f"{at}.nbc", (at, at))
        numba_compiler._evict(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == [str(at) for at in range(2, 9)]


def test_a_missing_file_does_not_end_an_eviction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_compiler, "_MOST", 3)
    (tmp_path / "gone.nbc").symlink_to(tmp_path / "nowhere")
    for at in range(4):
        (tmp_path / f"{at}.nbc").touch()
        os.utime(tmp_path / f"{at}.nbc", (at, at))
    numba_compiler._evict(tmp_path)
    assert not (tmp_path / "0.nbc").exists()
    assert (tmp_path / "1.nbc").exists()


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    gone = "import os, shutil\nshutil.rmtree(os.environ['NUMBA_CACHE_DIR'])\nopen(os.environ['NUMBA_CACHE_DIR'], 'w')\n"
    (tmp_path / "module.py").write_text(MODULE.replace("print(", gone + "print("))
    printed, lines = call(tmp_path)
    assert printed == COLD
    assert len(lines) == 1
    assert lines[0].endswith("compiling again")


def test_the_planner_starts_where_nothing_can_be_cached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    script = "from hydragraph.cost.micro_batch_order import longest_to_shortest"
    nowhere = "numba.core.caching.UserProvidedCacheLocator"  # which asks for NUMBA_CACHE_DIR, and there is none
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**environment, "NUMBA_CACHE_LOCATOR_CLASSES": nowhere},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "set NUMBA_CACHE_DIR" in ran.stderr


@thorough
@pytest.mark.parametrize("line", ["from other import added, TIMES", "import hydragraph.other as other"])
def test_a_change_of_an_imported_function_or_constant_compiles_its_users_again(line: str, tmp_path: Path) -> None:
    prefix = "other." if line.startswith("import") else ""
    (tmp_path / "module.py").write_text(
        "import sys, types\nimport other as read\n"
        "read.__name__ = 'hydragraph.other'\n"  # as a module of the package
        "sys.modules['hydragraph.other'] = read\nimport hydragraph\nhydragraph.other = read\n"
        f"{line}\nfrom hydragraph.kernels.numba_compiler import compiled\n\n"
        f"@compiled\ndef twice(a, b):\n    return {prefix}TIMES * {prefix}added(a, b)\n\n"
        "print(twice(3, 4), next(iter(twice.stats.cache_hits.values()), 0))\n"
    )
    for operator, times, printed in (("+", 2, COLD), ("*", 2, "24 0"), ("*", 3, "36 0")):
        (tmp_path / "other.py").write_text(
            "from hydragraph.kernels.numba_compiler import compiled\n\n"
            f"TIMES = {times}\n\n@compiled\ndef added(a, b):\n    return a {operator} b\n"
        )
        os.utime(tmp_path / "other.py", (times, ord(operator)))  # numba compares times and sizes
        assert call(tmp_path)[0] == printed
        assert call(tmp_path)[0] == f"{printed[:-1]}1"


def test_a_change_of_an_imported_named_tuple_compiles_its_users_again(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "from other import Pair\nfrom hydragraph.kernels.numba_compiler import compiled\n\n"
        "@compiled\ndef first(pair):\n    return pair.first\n\n"
        "print(first(Pair(first=3, second=4)), next(iter(first.stats.cache_hits.values()), 0))\n"
    )
    for fields, printed in (("first second", ["3 0"]), ("second first", ["3 0", "3 1"])):
        (tmp_path / "other.py").write_text(
            f"from collections import namedtuple\nPair = namedtuple('Pair', {fields!r})\n"
        )
        assert [call(tmp_path)[0] for _ in printed] == printed


WAITS = """
import os
from hydragraph.kernels.numba_compiler import compiled, compiled_elsewhere

@compiled
def added(a, b):
    return a + b

if not (other := os.fork()):
    added(3, 4)
    os._exit(0)
ended = lambda: os.waitid(os.P_PID, other, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
with compiled_elsewhere(ended):
    print(added(3, 4), next(iter(added.stats.cache_hits.values()), 0))
    print(added(3.0, 4.0), added.stats.cache_misses)  # the other process does not compile this one
os.waitpid(other, 0)
"""


def test_what_another_process_compiles_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(WAITS)
    printed, _ = call(tmp_path)
    first, second = printed.splitlines()
    assert first == "7 1"
    assert second.startswith("7.0 ")
    assert "float64" in second


def test_a_wait_that_ends_early_compiles_nothing() -> None:
    def never(a: int) -> int:
        return a

    def late() -> bool:
        raise StillCompiling("try again")

    function = compiled(never)
    with compiled_elsewhere(late), pytest.raises(StillCompiling, match="try again"):
        function(1)
    assert not function.signatures


def test_constants_that_compiled_callers_pass_compile_nothing_again() -> None:
    @compiled
    def scaled(a: int, factor: int, negative: bool) -> int:
        return -a * factor if negative else a * factor

    @compiled
    def both(a: int) -> int:
        return scaled(a, 2, False) + scaled(a, 3, True) + scaled(5, a, False)

    with event.install_recorder("numba:compile") as recorder:
        assert both(7) == 14 - 21 + 35
    begun = [each.data["dispatcher"].py_func.__name__ for _, each in recorder.buffer if each.is_start]
    assert begun == ["both", "scaled"]


def test_one_version_of_a_shared_function_serves_python_and_compiled_callers() -> None:
    @partial(compiled, shared=True)
    def halved(a: float) -> float:
        return a / 2

    @compiled
    def quartered(a: float) -> float:
        return halved(halved(a))

    assert (quartered(12.0), halved(12.0)) == (3.0, 6.0)
    assert len(halved.signatures) == 1


def test_processes_that_save_at_once_keep_their_codes_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [numba_compiler._Files(str(tmp_path), "added", "stamp") for _ in range(2)]
    for number, file in enumerate(files):
        monkeypatch.setattr(file, "_load_index", dict)  # both read the index before the other has saved
        file.save(number, f"code {number}")
    assert len(list(tmp_path.glob("*.nbc"))) == 2
    assert numba_compiler._Files(str(tmp_path), "added", "stamp").load(1) == "code 1"
