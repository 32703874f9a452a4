"""What a run says while it works: each kind of event, on which rank and in which step, and silence by default."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph import log
from hydragraph.checkpoint.folder import prune
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.rank_watch import RankWatch
from hydragraph.cluster.launch import join
from hydragraph.errors import Stopped
from hydragraph.passes.recently_used import LRU
from hydragraph.runtime.buffers import Buffers
from tests.commands.tiny import run, write
from tests.models import llama, sequences
from tests.thorough import thorough

LINE = re.compile(r"\[rank (\d+)/(\d+) step (\d+)\] (hydragraph[\w.]*): (.*)")


@pytest.fixture(autouse=True)
def nothing_is_shown_afterwards() -> Iterator[None]:
    yield
    log.show(None)


def factory(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-3)


def shown_lines(text: str) -> list[tuple[str, str, str]]:
    """Return (step, logger, sentence) of every line; there must be no others."""
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert all(found), text
    return [(m[3], m[4].removeprefix("hydragraph."), m[5]) for m in found if m is not None]


@thorough
def test_a_run_tells_its_events_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # an empty cache: no earlier check
    plain, recomputed = (hg.Strategy.parse(text, layers=1) for text in ("<tp1,pp1>", "<[0]x1r>"))
    log.at_step(0)
    log.show("info")
    exe = hg.compile(model(), plain, factory, check="full")
    batch = sequences([5, 7])
    for number, strategy in enumerate((plain, recomputed, plain), start=1):
        exe.step(batch, strategy)
        exe.save(tmp_path / f"step-{number}")
    prune(tmp_path, keep=2)
    exe.stopping = 15
    with pytest.raises(Stopped):
        exe.step(batch)
    exe.close()
    events = shown_lines(capsys.readouterr().err)
    patterns = [
        ("0", "frontend.capture", r"captured LlamaForCausalLM, 1 layers, 4 templates, in \d+\.\d\d s"),
        ("0", "passes.variants", r"compiled layer\.0 \(eager\) for rank 0 of tp1 in \d+\.\d\d s"),
        ("0", "frontend.check", r"checked LlamaForCausalLM: .*worst gradient error .* s"),
        ("1", "engine.iterations", r"prepared strategy <tp1,pp1>@\w+ \(train\) for the first time, on all ranks"),
        ("1", "checkpoint.save_and_load", r"began checkpoint .*step-1"),
        ("1", "checkpoint.save_and_load", r"wrote checkpoint .*step-1 in \d+\.\d\d s"),
        ("2", "passes.variants", r"compiled layer\.0 \(eager\) for rank 0 of tp1, recomputed in \d+\.\d\d s"),
        ("2", "frontend.check", r"checked the graphs of stages of kind <tp1r>: .*"),
        ("2", "engine.iterations", r"prepared strategy <tp1,pp1>r@\w+ \(train\) .*"),
        ("3", "checkpoint.folder", r"deleted checkpoint .*step-1: only the newest 2 are kept"),
        ("4", "engine.iterations", r"a rank was asked to stop \(15\): the next step does not start"),
    ]
    at = -1
    for step, name, pattern in patterns:
        here = [i for i, e in enumerate(events) if e[:2] == (step, name) and re.fullmatch(pattern, e[2])]
        assert len(here) == 1, (pattern, events)
        assert here[0] > at, (pattern, events)
        at = here[0]


def model() -> nn.Module:
    return llama(layers=1, width=54)  # a shape of this file's own, so that nothing else has compiled it


def test_what_is_dropped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    recent, buffers = LRU[str, object](1), Buffers(torch.device("cpu"))
    with caplog.at_level(logging.DEBUG, "hydragraph"):
        for key in "ab":
            recent.get(key, dict)
        buffers.give(buffers.take(250_000))
        buffers.begin()
        buffers.begin()
    assert caplog.messages == [
        "dropped the least recently used dict: 1 are kept",
        "dropped 1 idle buffers, in total 1.0 MB",
    ]


def test_buffers_are_not_counted_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    buffers = Buffers(torch.device("cpu"))
    with caplog.at_level(logging.INFO, "hydragraph"):
        buffers.give(buffers.take(8))
        buffers.begin()
        buffers.begin()
    assert not caplog.messages


class Kept(logging.Handler):
    """Keeps the text of every record."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(log.FORMAT))
        self.addFilter(log.RankFilter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def keep() -> Kept:
    """Keep what this process says from now on."""
    kept = Kept()
    logging.getLogger("hydragraph").addHandler(kept)
    return kept


def make_groups() -> tuple[list[str], int | None]:
    kept, world = keep(), join("cpu")
    groups = Groups(world, timedelta(minutes=1), capacity=1)
    log.at_step(7)
    groups.tensor_parallel([(0, 1), (2,)])
    groups.tensor_parallel([(1, 2)])
    groups.close()
    return kept.lines, log.shown()


def test_ranks_show_what_their_launcher_shows_and_say_who_they_are() -> None:
    log.show("info")
    for rank, (lines, level) in enumerate(hg.launch(make_groups, 3)):
        assert level == logging.INFO
        here, name = f"[rank {rank}/3 step", "hydragraph.cluster.communicators"
        pattern = rf"{re.escape(here)} 0\] {name}: created the communicators of 3 ranks over gloo in \d+\.\d\d s"
        assert re.fullmatch(pattern, lines[0])
        assert lines[1:] == [
            f"{here} 7] {name}: created tensor-parallel communicators of ranks (0, 1)",
            f"{here} 7] {name}: created tensor-parallel communicators of ranks (1, 2)",
            f"{here} 7] {name}: closed the least recently used communicator (ranks (0, 1)): at most 1 are kept",
        ]


def test_ranks_of_a_quiet_launcher_are_quiet() -> None:
    assert hg.launch(log.shown, 1) == [None]


def fail(folder: Path) -> None:
    log.show("info")
    kept, world = keep(), join("cpu")
    if world.rank == 1:
        raise LookupError("no such luck")
    try:
        with world.calling("gather"):
            world.gather(0)
    finally:
        (folder / "lines").write_text("\n".join(kept.lines))


def test_a_failure_is_told_by_the_ranks_that_notice_it(tmp_path: Path) -> None:
    with pytest.raises(LookupError):
        hg.launch(fail, 2, tmp_path)
    told = r"shut down communication: rank 1 .*no such luck.*"
    pattern = rf"\[rank 0/2 step 0\] hydragraph\.cluster\.failure\.rank_watch: {told}"
    assert re.search(pattern, (tmp_path / "lines").read_text())


def test_who_is_no_rank_says_nothing_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_position", log._Position())
    record = logging.LogRecord("hydragraph.x", logging.INFO, "", 0, "hello", (), None)
    assert log.RankFilter().filter(record)
    assert logging.Formatter(log.FORMAT).format(record) == "hydragraph.x: hello"
    RankWatch(None, 2, 1)  # what any process makes that joins
    log.at_step(5)
    log.RankFilter().filter(record)
    assert [getattr(record, name) for name in ("rank", "ranks", "step")] == [2, 1, 5]


def test_lines_are_shown_once_and_no_more_once_they_are_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("hydragraph.x")
    logger.info("before")
    log.show("warning")
    log.show("debug")
    logger.debug("meanwhile")
    assert (log.shown(), capsys.readouterr().err.count("meanwhile")) == (logging.DEBUG, 1)
    log.show(None)
    logger.error("after")
    assert log.shown() is None
    assert "after" not in capsys.readouterr().err
    with pytest.raises(ValueError, match="log level 'loud': use debug, info, warning, error"):
        log.show("loud")


def test_the_library_is_quiet_and_configures_nothing() -> None:
    code = """
import logging, hydragraph, hydragraph.cli, hydragraph.log
logging.getLogger("hydragraph.cluster.communicators").info("nobody asked")
for name in (None, "hydragraph"):
    logger = logging.getLogger(name)
    assert not logger.handlers and logger.propagate and not logger.isEnabledFor(logging.INFO), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_what_owns_a_process_configures_logging() -> None:
    package = Path(log.__file__).parent
    words = re.compile(r"\b(basicConfig|addHandler|setLevel|setLogRecordFactory|dictConfig)\(")
    found = {str(p.relative_to(package)) for p in package.rglob("*.py") if words.search(p.read_text())}
    # A fork that stands in for a new interpreter undoes what its launcher has configured.
    assert found == {"cli.py", "log.py", "cluster/processes/launcher_fork.py"}


@thorough
def test_the_command_line_shows_what_it_is_asked_for(tmp_path: Path) -> None:
    config = write(tmp_path, ranks=1, strategies=["<tp1,pp1>"], steps=1)
    shown = run("train", config, "--log-level", "info")
    assert shown.exit_code == 0, shown.output
    names = {m[4] for line in shown.stderr.splitlines() if (m := LINE.fullmatch(line)) is not None}
    assert {f"hydragraph.{n}" for n in ("frontend.capture", "engine.session", "checkpoint.save_and_load")} <= names
    assert log.shown() is None
    wrong = run("train", config, "--log-level", "loud")
    assert wrong.exit_code == 2
    assert "hydragraph: log level 'loud': use debug, info, warning, error" in wrong.stderr


@pytest.mark.parametrize("verb", ["train", "check", "verify", "compile", "simulate", "profile", "plan"])
def test_verbs_that_work_for_long_take_a_level(verb: str) -> None:
    assert "--log-level" in run(verb, "--help").stdout
