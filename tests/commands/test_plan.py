"""`hydragraph plan`: what it reads, prints and draws, and that a mistake is one sentence."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import hydragraph as hg
from hydragraph import cli
from hydragraph.commands import plan_costs
from hydragraph.commands import plan_devices as command
from hydragraph.commands.plan_costs import compile_graphs, compiled_by_two, excluded_text
from hydragraph.commands.plan_options import PlanOptions
from hydragraph.cost.costs import Costs
from hydragraph.cost.published_errors import MEMORY
from hydragraph.data.tokenizer import train_bpe
from hydragraph.errors import StillCompiling
from hydragraph.planner import first_compilation
from hydragraph.planner import plan as planning
from hydragraph.report.number_text import seconds_text
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.train.config import TrainConfig
from hydragraph.train.config_checks import read_strategies
from hydragraph.train.model import skeleton
from hydragraph.train.plan_input import read_candidates, read_costs, read_lengths
from tests.commands.tiny import run, write
from tests.cost import priced
from tests.data.written import write_tokens
from tests.planner.examples import ENTRY, PROFILE, lengths
from tests.train.plain import settings

SIZES = lengths(400, 0, 6000)
LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a profile, as itself and as an entry of constants, and with lengths."""
    where = tmp_path_factory.mktemp("even")
    (where / "constants.json").write_text(json.dumps({"profiles": [ENTRY]}))
    (where / "lengths.txt").write_text("\n".join(map(str, SIZES)) + "\n")
    PROFILE.save(where / "profile.json")
    return where


@pytest.fixture(scope="module")
def planned(folder: Path) -> str:
    """What is printed of the profile's plan."""
    result = plan(folder)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan(folder: Path, *more: object, profile: str = "profile.json", data: str = "lengths.txt") -> Result:
    given = ["--profile", str(folder / profile), "--lengths", str(folder / data), "--devices", "8", "--context", "6000"]
    return CliRunner().invoke(cli.app, ["plan", *given, "--tokens", "20000", "--iterations", "1", *map(str, more)])


def test_text_json_and_picture_agree(folder: Path, planned: str) -> None:
    assert "best for all mini-batches: " in planned
    found = plan(folder, "--json", "--picture", folder / "plan.png")
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert f"best for all mini-batches: {record['candidates'][0]['text']}, " in planned
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert not list(folder.glob("*.partial"))


def test_an_entry_of_constants_is_the_same_profile(folder: Path, planned: str) -> None:
    assert plan(folder, profile="constants.json#made up").stdout == planned


def test_explain_shows_all_candidates(folder: Path) -> None:
    shown = plan(folder, "--explain").stdout
    assert "seconds go to" in shown
    assert "excluded <tp16,pp1>: its fit failed" in shown
    for candidate in json.loads(plan(folder, "--json").stdout)["candidates"]:
        assert candidate["text"] in shown


def test_own_strategies(folder: Path) -> None:
    record = json.loads(plan(folder, "--strategy", "<tp4,pp2>", "--strategy", "2*<tp4,pp1>", "--json").stdout)
    assert sorted(c["text"] for c in record["candidates"]) == ["2*<tp4,pp1>", "<tp4,pp2>"]
    assert read_candidates(["<tp4,pp1> + 2*<tp1,pp2>"]) == [[(4, 1), (1, 2), (1, 2)]]


def test_lengths_come_from_text_or_from_a_token_file(folder: Path) -> None:
    assert read_lengths(folder / "lengths.txt") == SIZES
    texts = ["one", "one two three", "one two"]
    file = write_tokens(folder / "tokens.bin", texts, train_bpe(texts, 300))
    assert read_lengths(folder / "tokens.bin") == file.lengths.tolist()
    (folder / "tokens.bin").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_lengths(folder / "tokens.bin")


@pytest.mark.parametrize(
    ("options", "changed", "sentence"),
    [
        ((), {"profile": "constants.json"}, "constants.json#made up"),
        ((), {"profile": "lengths.txt"}, "not JSON"),
        ((), {"profile": "nowhere.json"}, "nowhere.json"),
        ((), {"data": "constants.json"}, "is not a number of tokens: write one length per line"),
        (("--strategy", "<tp4"), {}, "--strategy 0:"),
        (("--strategy", "<[0,1]x4,[2]x4>"), {}, "write regular pipelines, as in <tp4,pp2>"),
        (("--strategy", "<tp3,pp1>"), {}, "scheme <tp3,pp1>: it was not measured"),
        (("--strategy", "4*<tp4,pp1>"), {}, "needs 16 devices, but there are 8"),
        (("--deadline", "0"), {}, "--deadline is for devices that differ"),
        (("--context", "900000"), {}, "no measured scheme fits 900000 tokens on 8 devices"),
    ],
)
def test_a_mistake_is_a_sentence(
    folder: Path, options: tuple[str, ...], changed: dict[str, str], sentence: str
) -> None:
    result = plan(folder, *options, **changed)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_help_teaches_with_an_example() -> None:
    shown = " ".join(CliRunner().invoke(cli.app, ["plan", "--help"]).stdout.split())
    assert "hydragraph plan --profile profile.json" in shown


# Devices that differ: --cluster.


def test_kinds_of_stages_that_there_was_no_time_to_compile_are_left_out() -> None:
    costs = priced.costs(LAYERS, priced.mixed())
    assert compile_graphs(costs, None) is costs
    left = compile_graphs(costs, -1.0)
    assert {kind.tp for name in costs.cluster.types for kind in left.profile.of(name).pieces} == {1, 4}
    assert hg.plan(left, hg.Workload(sequences=8, length=64)).seconds > 0
    assert excluded_text(costs, costs) == ""
    assert excluded_text(costs, left).startswith("; excluded 2 kinds of stages that were not compiled in time: ")


def test_kinds_that_the_other_process_has_compiled_are_kept_at_the_deadline() -> None:
    costs = priced.costs(LAYERS, priced.mixed())
    left = compile_graphs(costs, -1.0, ready=lambda _, part: bool(part.kind.recompute))
    kept = {kind for kind in left.profile.pieces if kind.tp == 2}
    assert kept == {StageKind(2, False, True)}


def test_another_process_compiles_half_of_the_graphs_then_sums_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = priced.costs(LAYERS, priced.mixed())
    seen: list[StageKind] = []
    monkeypatch.setattr(type(costs.blocks), "adds", lambda _, block, part: seen.append(part.kind))
    compile_graphs(costs, None)
    own, others = plan_costs._halves(costs)
    assert own
    assert others
    assert list(dict.fromkeys(seen)) == [*own, *others]
    seen.clear()
    plan_costs.compile_other_half(costs)
    pieces = [StageKind(2, False, again, True) for again in (False, True)]
    assert list(dict.fromkeys(seen)) == [*others, *pieces]


def test_graphs_that_share_a_trace_are_compiled_by_one_process() -> None:
    costs = priced.costs(LAYERS, priced.mixed())
    pieces = costs.profile.pieces
    further = {kind._replace(sequence_parallel=True): piece for kind, piece in pieces.items() if kind.tp > 1}
    halves = plan_costs._halves(costs.changed(profile=replace(costs.profile, pieces={**pieces, **further})))
    kinds = [kind for half in halves for kind in half]
    assert {(kind.sequence_parallel, kind.recompute) for kind in kinds} == {*product((False, True), repeat=2)}
    own, others = ({(kind.tp == 1, kind.sequence_parallel) for kind in half} for half in halves)
    assert own.isdisjoint(others)


@pytest.mark.parametrize("helped", [False, True])
def test_the_other_half_is_awaited_while_the_other_process_runs(helped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = priced.costs(LAYERS, priced.mixed())
    own, others = plan_costs._halves(costs)
    compiled: list[StageKind] = []
    asked: list[StageKind] = []

    def adds(_: object, block: str, part: StagePart) -> None:
        time.sleep(0.05 if part.kind in own else 0)
        compiled.append(part.kind)

    def ready(block: str, part: StagePart) -> bool:
        assert set(own) <= set(compiled)
        asked.append(part.kind)
        return len(asked) > 3

    monkeypatch.setattr(plan_costs, "POLL_S", 0.0)
    monkeypatch.setattr(type(costs.blocks), "adds", adds)
    compile_graphs(costs, None, ready, lambda: helped)
    assert list(dict.fromkeys(compiled)) == [*own, *others]
    assert list(dict.fromkeys(asked)) == (others if helped else [])
    assert asked[:4] == others[:1] * 4 * helped


def test_the_other_process_ends_with_the_compilation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def start(_: str, **options: Any) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options))
        return begun[0]

    monkeypatch.setattr(plan_costs, "start_module", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    values: dict[str, Any] = {each.name: None for each in fields(PlanOptions)}
    asked = PlanOptions(**values | {"model": tmp_path / "run.yaml"})
    with pytest.raises(RuntimeError, match="a mistake"), compiled_by_two(asked):
        raise RuntimeError("a mistake")
    assert begun[0].poll() is not None


def test_the_other_process_ends_if_the_command_is_killed() -> None:
    code = "from hydragraph.commands import plan_costs; plan_costs._end_with_command()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.3)
    assert other.stdin is not None
    other.stdin.close()  # as the system does when a process is killed
    assert other.wait(60) == 1


SOME = ("--sequences", "8", "--length", "64")
TYPES = ("--profile", "fast.json", "--profile", "slow.json")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a node of two fast devices and one of two slow ones, and with profiles of both."""
    where = tmp_path_factory.mktemp("uneven")
    priced.mixed().save(where / "cluster.yaml")
    text = (where / "cluster.yaml").read_text()
    # Groups of one device only need few graphs.
    (where / "apart.yaml").write_text(
        text.replace("devices: 2", "devices: 1, count: 2").replace("cards: 2", "cards: 1")
    )
    (where / "unknown.yaml").write_text(text.replace("type: slow", "type: odd"))
    (where / "small.yaml").write_text(text.replace("memory_bytes: 1000000000", "memory_bytes: 100000"))
    (where / "empty.yaml").write_text(text.partition("nodes:")[0] + "nodes: []\n")
    flat = tuple(replace(device, node=0) for device in priced.mixed().devices)
    hg.Cluster(flat, priced.FAST, priced.SLOW).save(where / "flat.yaml")
    priced.profile(LAYERS, "fast").save(where / "fast.json")
    priced.profile(LAYERS, "slow", 2.5).save(where / "slow.json")
    priced.profile(LAYERS).save(where / "typeless.json")
    for name, rates in (
        ("slow_one", "{0: 2.57}"),
        ("lost", "{0: inf, 1: .inf, 2: inf, 3: inf}"),
        ("half", "{1: 0.5}"),
        ("other", "{7: 2}"),
        ("list", "[1]"),
    ):
        (where / f"{name}.yaml").write_text(rates)
    (where / "sizes.txt").write_text("\n".join(map(str, lengths(60, 0, 600))))
    write(where)
    return where


def plan_devices(where: Path, *options: object) -> Result:
    names = [str(where / str(o)) if str(o).endswith((".yaml", ".json", ".png", ".txt")) else str(o) for o in options]
    return run("plan", *names)


def test_a_plan_is_told_drawn_and_written(uneven: Path) -> None:
    files = ("--output", "a, it's.yaml", "--picture", "plan.png", "--health", "slow_one.yaml")
    told = plan_devices(uneven, "--cluster", "cluster.yaml", *TYPES, *SOME, *files)
    assert told.exit_code == 0, told.output
    written = hg.Strategy.load(uneven / "a, it's.yaml")
    assert f"strategy: {written.name}" in told.stdout
    assert (
        "computation as measured: made up for fast, made up for slow; memory predicted from the profile" in told.stdout
    )
    listed = told.stdout.partition("to train, set ")[2].partition(" in the run's config")[0]
    printed = yaml.safe_load(f"{{{listed}}}")
    options = shlex.split(told.stdout.partition("hydragraph train config.yaml ")[2].splitlines()[0])
    config = TrainConfig.load(uneven / "config.yaml", options[1::2])
    (uneven / "printed.yaml").write_text(yaml.safe_dump({**settings(uneven), **printed}))
    assert TrainConfig.load(uneven / "printed.yaml") == config
    read = read_costs(config.plan, config.ranks)  # the costs of this plan
    assert isinstance(read, Costs)
    assert read.profile == priced.costs(LAYERS, priced.mixed()).profile
    assert read.health == hg.Health({0: 2.57})
    assert (uneven / "plan.png").read_bytes().startswith(b"\x89PNG")
    # The same again, as JSON, is what hg.plan says; and what was written is read as what runs now.
    kept = ("--running", "a, it's.yaml", "--home", "equal", "--json", "--price", "2.5")
    record = json.loads(plan_devices(uneven, "--cluster", "cluster.yaml", *TYPES, *SOME, *files, *kept).stdout)
    costs = priced.costs(LAYERS, priced.mixed(), hg.Health({0: 2.57})).changed(home=hg.Home())
    expected = hg.plan(costs, hg.Workload(8, 64), running=written)
    assert record["strategy"] == expected.strategy.name
    assert record["seconds"] == pytest.approx(expected.seconds)
    assert record["home"] == str(expected.home)
    assert record["memory"] == list(expected.memory)
    assert {rival["strategy"] for rival in record["rivals"]} == {rival.strategy.name for rival in expected.rivals}
    assert any("(mostly " in rival["why"] for rival in record["rivals"])
    assert record["price"]["per_hour"] == 2.5 * len(set(expected.strategy.devices))


def test_a_budget_chooses_the_nodes_to_rent(uneven: Path) -> None:
    asked = ("--cluster", "cluster.yaml", *TYPES, *SOME, "--price", "fast=2", "--price", "slow=0.5")
    one = json.loads(plan_devices(uneven, *asked, "--budget", "4.5", "--json").stdout)
    assert [each["devices"] for each in one["rented"]] == ["2 fast"]
    assert one["types"] == ["fast", "fast"]
    assert one["price"]["per_hour"] <= 4.5
    (uneven / "slow_three.yaml").write_text("{0: 5.0, 3: 2.57}")
    health = ("--health", "slow_three.yaml", "--output", "rented.yaml")
    written = plan_devices(uneven, *asked, "--budget", "1", *health).stdout
    printed = shlex.split(written.partition("hydragraph train config.yaml ")[2].splitlines()[0])
    config = TrainConfig.load(uneven / "config.yaml", printed[1::2])
    read = read_costs(config.plan, config.ranks)  # of the rented devices
    assert isinstance(read, Costs)
    assert list(read.cluster.types) == ["slow"]
    assert read.health == hg.Health({1: 2.57})
    result = plan_devices(uneven, *asked, "--budget", "5")
    assert result.exit_code == 0, result.output
    assert "rent: 2 fast + 2 slow for $5 an hour: " in result.stdout
    for options, why in (
        ((), "--budget chooses devices by their price"),
        (("--price", "9"), "the cheapest node costs $18"),
    ):
        result = plan_devices(uneven, *asked[:-4], *options, "--budget", "5")
        assert result.exit_code == 2
        assert why in result.stderr


def test_a_model_is_priced_by_datasheet_and_its_compiled_graphs(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = plan_devices(uneven, "--cluster", "apart.yaml", "--model", "config.yaml", "--output", "model.yaml")
    assert told.exit_code == 0, told.output
    assert "not measured: datasheet of fast at up to 65% of 1000 TFLOP/s" in told.stdout
    assert f"; {MEMORY}\n" in told.stdout
    assert "3 sequences of 32 tokens on 4 devices" in told.stdout  # a step of the config
    # A run accepts the written file with the printed options.
    (said,) = (line for line in told.stdout.splitlines() if "hydragraph train" in line)
    options = shlex.split(said.partition("hydragraph train config.yaml ")[2])
    config = TrainConfig.load(uneven / "config.yaml", options[1::2])
    (strategy,) = read_strategies(config.strategies, skeleton(config.model, 300), config.ranks)
    assert strategy == hg.Strategy.load(uneven / "model.yaml")
    assert config.ranks == 4
    # The run assigns sequences by the costs of these devices, and all commands predict the same.
    assert (config.plan.choose, config.plan.cluster) == (True, str(uneven / "apart.yaml"))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # this time no other process compiles from the other end
    record = json.loads(plan_devices(uneven, "--cluster", "apart.yaml", "--model", "config.yaml", "--json").stdout)
    (checked,) = json.loads(run("check", uneven / "config.yaml", *options, "--json").stdout)["strategies"]
    assert checked["seconds"] == pytest.approx(record["seconds"])
    peaks = [rank["peak_bytes"] for rank in checked["ranks"]]
    assert all(peak <= most for peak, most in zip(peaks, record["memory"], strict=True))
    simulated = run("simulate", uneven / "config.yaml", *options, "--trace", uneven / "trace.json").stdout
    assert f" {seconds_text(record['seconds'])} " in simulated


def test_the_rest_of_a_step_is_a_shorter_sequence(tmp_path: Path) -> None:
    data = settings(tmp_path)["data"]

    def workload(step: int, **options: int) -> hg.Workload:
        config = TrainConfig.load(write(tmp_path, data={**data, "tokens_per_step": step, "max_length": 32}))
        return PlanOptions(**options).workload(config)  # pyrefly: ignore[bad-argument-type]

    assert workload(60) == hg.Workload(lengths=[[32, 28]])
    assert workload(64) == workload(65) == workload(60, sequences=2) == hg.Workload(2, 32)
    assert workload(64, tokens=20) == hg.Workload(1, 32)
    assert workload(40, tokens=60, length=24) == hg.Workload(lengths=[[24, 24, 12]])


def test_the_deadline_counts_from_the_start_of_the_command(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def late(_: bool, seconds: float) -> None:
        limits.append(seconds)
        raise StillCompiling("try again")

    monkeypatch.setattr(first_compilation, "first_compilation", late)
    for began in (None, time.monotonic() - 6000):
        monkeypatch.setattr(command, "began", began)
        result = plan_devices(uneven, "--cluster", "cluster.yaml", *TYPES, *SOME, "--deadline", "5000")
        assert result.exit_code == 1
        assert result.stderr.endswith("\nhydragraph: try again\n")
    assert limits[0] > limits[1] == 0


def test_a_stopped_search_prints_its_best_plan(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, improved: Any, **__: Any) -> None:
        for seconds in (12.5, 10.77):
            improved(seconds, "<tp1,pp1>")
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "plan", stopped)
    result = plan_devices(uneven, "--cluster", "cluster.yaml", *TYPES, *SOME)
    assert result.exit_code == 130
    assert result.stdout == "best plan so far: <tp1,pp1>, 10.77 s an iteration\n"
    assert "searching; best so far: 12.5 s an iteration\n" in result.stderr
    assert result.stderr.endswith("hydragraph: stopped\n")


def test_sample_mini_batches_give_candidates(uneven: Path) -> None:
    sizes = ("--lengths", "sizes.txt", "--tokens", "2000", "--iterations", "2", "--context", "300")
    told = plan_devices(uneven, "--cluster", "cluster.yaml", *TYPES, *sizes, "--deadline", "0", "--json")
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout)
    assert record["strategies"][0] == record["strategy"]
    assert 0 < record["seconds"] < 60


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--cluster", "empty.yaml", *TYPES, *SOME), "empty.yaml: 'devices' is empty"),
        (("--cluster", "unknown.yaml", *TYPES, *SOME), "nodes[1]: unknown device type 'odd': use fast, slow"),
        (("--cluster", "flat.yaml", "--model", "config.yaml", *SOME), "the devices of node 0 have different types"),
        (("--cluster", "cluster.yaml", *TYPES[:2], *SOME), "device type 'slow' was not measured"),
        (("--cluster", "cluster.yaml", "--profile", "typeless.json", *SOME), "does not name its device type"),
        (("--cluster", "cluster.yaml", *SOME), "--cluster needs --model"),
        (("--cluster", "cluster.yaml", *TYPES), "the workload is missing: give"),
        (("--cluster", "cluster.yaml", *TYPES, "--length", "64"), "the workload is missing: give"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--lengths", "sizes.txt"), "omit --sequences and --length"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--tokens", "512"), "both set the size"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--context", "64"), "for equal sequences give --length"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--efficiency", "0.5"), "--efficiency uses a datasheet"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--method", "best"), "'method' is 'best': use 'auto'"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--running", "<[0]x3>"), "--running: "),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--output", "nowhere/plan.yaml"), "does not exist: create it"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--output", "a.json"), "name a file that ends in .yaml"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--health", "half.yaml"), "half.yaml: rates: rank 1 has 0.5"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--health", "other.yaml"), "other.yaml: rank 7 is not in "),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--health", "list.yaml"), "give rates by rank, such as {3: 2.57"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--health", "lost.yaml"), "all devices are lost"),
        (("--cluster", "small.yaml", *TYPES, *SOME), "nothing fits: in the closest strategy, 2*<tp2,pp1>w, rank "),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--devices", "4"), "--devices is for equal devices"),
        (("--cluster", "cluster.yaml", *TYPES, *SOME, "--explain"), "--explain is for equal devices"),
        ((*TYPES[:2], "--health", "half.yaml"), "--health is for devices that differ: also give --cluster"),
        (TYPES[:2], "for equal devices give --profile, --lengths, --devices and --context"),
    ],
)
def test_a_mistake_about_devices_is_a_sentence(uneven: Path, options: tuple[str, ...], sentence: str) -> None:
    result = plan_devices(uneven, *options)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
