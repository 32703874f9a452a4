"""Checkpoints in pieces during a run: the newest ones are read when it continues, and those of other runs never are."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hydragraph as hg
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.loop import train
from hydragraph.train.run_folder import RunFolder
from hydragraph.train.run_pieces import check_places
from hydragraph.train.step_metrics import Metrics
from tests.thorough import thorough
from tests.train.plain import Watched, settings


def config(folder: Path, **pieces: Any) -> TrainConfig:
    """Return a run of one rank that keeps pieces after every step and saves at its end."""
    given = {"checkpoint": {"pieces": {"peers": False, "local": str(folder / "local"), **pieces}}}
    run = {**settings(folder), **given, "checkpoint_every": 0, "evaluate_every": 0, "check": "off"}
    return from_record(TrainConfig, run | {"strategies": ["<tp1,pp1>"]})


class LostError(Exception):
    """Ends a run without saving."""


class LosingAfter(Watched):
    """Ends the run after a step. Each step waits until the previous step's pieces are written."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def stepped(self, metrics: Metrics) -> None:
        super().stepped(metrics)
        while writing := [each for each in threading.enumerate() if each.name == "hydragraph-pieces"]:
            writing[0].join()
        if metrics.step == self.step:
            raise LostError


def lost(run: TrainConfig, after: int, how: Any = "new", **changed: Any) -> Watched:
    watched = LosingAfter(after)
    with pytest.raises(LostError):
        train(run, how, hg.compile, watched, **changed)
    return watched


def losses(watched: Watched) -> list[float]:
    return [metrics.loss for metrics in watched.steps]


def test_a_lost_run_continues_from_its_newest_pieces(tmp_path: Path) -> None:
    run = config(tmp_path)
    before = lost(run, 4)
    assert [step.step for step in before.steps] == [1, 2, 3, 4]
    assert RunFolder(tmp_path / "run").last().step == 0
    resumed = Watched()
    outcome = train(run, "resume", hg.compile, resumed)
    assert any("continuing after step 3 of 6, from checkpoint pieces" in note for note in resumed.notes)
    assert losses(resumed)[0] == losses(before)[3]
    assert [metrics.step for metrics in outcome.history] == [1, 2, 3, 4, 5, 6]
    assert list((tmp_path / "local").iterdir()) == [], "deleted at the end"
    whole = Watched()
    train(replace(run, output=str(tmp_path / "whole" / "run")), "new", hg.compile, whole)
    assert losses(whole) == [metrics.loss for metrics in outcome.history]


@thorough
def test_pieces_of_a_course_that_was_left_are_not_read(tmp_path: Path) -> None:
    run = replace(config(tmp_path), checkpoint_every=2)
    lost(run, 6)
    lost(run, 3, "resume", step=2)  # pieces of steps 4 and 5 are still on the disk
    resumed = Watched()
    train(run, "resume", hg.compile, resumed)
    assert [metrics.step for metrics in resumed.steps] == [3, 4, 5, 6]
    lost(run, 5, "overwrite")
    lost(run, 2, "overwrite")
    resumed = Watched()
    train(run, "resume", hg.compile, resumed)
    assert resumed.done == 1


def test_places_that_cannot_be_written_are_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_DISK", raising=False)
    with pytest.raises(ValueError, match=r"local is '\$NO_SUCH_DISK/x', but \$NO_SUCH_DISK is not set here"):
        check_places(config(tmp_path, local="$NO_SUCH_DISK/x"))
    monkeypatch.setenv("NO_SUCH_DISK", str(tmp_path / "disk"))
    check_places(config(tmp_path, local="$NO_SUCH_DISK/x"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"checkpoint\.pieces\.shared .*file/x: a test file cannot be written"):
        train(config(tmp_path, shared=str(tmp_path / "file" / "x")), "new", hg.compile, Watched())
    with pytest.raises(ValueError, match=r"shared nosuch://bucket: .*nosuch"):
        check_places(config(tmp_path, shared="nosuch://bucket"))
    assert not (tmp_path / "run" / "checkpoints").exists()
    check_places(config(tmp_path))
    assert list((tmp_path / "local").iterdir()) == []


def test_a_store_of_another_machine(tmp_path: Path) -> None:
    """S3 as moto's server offers it: pip install "moto[server]" s3fs."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    here = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    here.start()
    try:
        host, port = here.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            import boto3  # pyrefly: ignore[missing-import]

            client = boto3.client("s3", region_name="us-east-1")
            client.create_bucket(Bucket="bucket")
            run = config(tmp_path, shared="s3://bucket/pieces")
            check_places(run)
            lost(run, 5)
            stored = [each["Key"] for each in client.list_objects_v2(Bucket="bucket")["Contents"]]
            assert all(key.startswith("pieces/run-") for key in stored)
            for path in (tmp_path / "local").glob("*/step-*/*/*"):
                path.unlink()  # this machine's disk is lost, and only the store has the pieces
            resumed = Watched()
            train(run, "resume", hg.compile, resumed)
            assert resumed.done >= 2
            assert client.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
            with pytest.raises(ValueError, match="a test file cannot be written"):
                check_places(config(tmp_path, shared="s3://no-such-bucket/pieces"))
    finally:
        here.stop()
