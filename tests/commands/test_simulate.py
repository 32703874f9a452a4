"""`hydragraph simulate`: times by hand, the order of strategies, the default split, and what it writes."""

# pyrefly: ignore-errors[bad-argument-type]
from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.actors import stage_actors
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.cost.published_errors import FLAT, PUBLISHED
from hydragraph.cost.timeline import run as run_actors
from hydragraph.ir.instruction import Op, Stream
from hydragraph.ir.program import Program
from hydragraph.report.number_text import bytes_text, counts_text, seconds_text
from hydragraph.report.simulation_price import PricedStrategy, price, share, spread
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.strategy import Strategy
from hydragraph.train.config import ModelConfig
from hydragraph.train.model import skeleton
from tests.commands.tiny import run, write
from tests.cost.explicit_work import ExplicitWork, explicit
from tests.cost.measured import measured
from tests.passes.test_pipeline import model
from tests.thorough import thorough

INSTANT = Interconnect(1e300, 0.0)
SLOW = Device(1e7, int(1e12), 1e300)  # computation is all that takes time
TOKENS = 32
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def program() -> Program:
    return hg.capture(skeleton(ModelConfig("LlamaForCausalLM", SIZES), 300))


def cluster(*speeds: float) -> Cluster:
    return Cluster(tuple(Device(each, int(1e12), 1e300) for each in speeds), INSTANT, INSTANT)


def costs(program: Program, where: Cluster) -> Costs:
    return Costs(datasheet(program, where, efficiency=1.0), where)


def priced(program: Program, text: str, counts: list[int], where: Cluster) -> PricedStrategy:
    return price(costs(program, where), Strategy.parse(text, 2), Assignment.even(counts, TOKENS))


def test_times_by_hand(program: Program) -> None:
    """Four micro-batches; a product with P weights takes 6 P T operations, and attention 4 T^2 H D (3 / 2 of both)."""
    layer = 6 * (4 * 16 * 16 + 3 * 16 * 24) * TOKENS + 3 * 4 * TOKENS**2 * 16 / 2
    head = 6 * 300 * 16 * TOKENS
    whole, first, last = (seconds / 1e6 for seconds in (2 * layer + head, layer, layer + head))
    two = cluster(1e6, 1e6)
    assert priced(program, "<[0]x2>", [4], two).seconds == pytest.approx(4 * whole)
    assert priced(program, "2*<tp1,pp1>", [2, 2], two).seconds == pytest.approx(2 * whole)
    # The second stage is the slower one and starts after the first forward, a third of that stage's work.
    pipeline = priced(program, "<tp1,pp2>", [4], two)
    assert pipeline.seconds == pytest.approx(first / 3 + 4 * last + first * 2 / 3)
    assert pipeline.tokens_per_s == pytest.approx(4 * TOKENS / pipeline.seconds)
    assert pipeline.busy() == pytest.approx([4 * first / pipeline.seconds, 4 * last / pipeline.seconds])


def test_the_split_follows_the_speed(program: Program) -> None:
    strategy = Strategy.parse("2*<tp1,pp1>", 2)
    assert share(costs(program, cluster(3e6, 1e6)), strategy, TOKENS, 4) == [3, 1]
    assert share(costs(program, cluster(1e6, 1e6)), strategy, TOKENS, 4) == [2, 2]
    assert share(costs(program, cluster(9e6, 1e6)), strategy, TOKENS, 4) == [4, 0]
    lopsided = priced(program, "2*<tp1,pp1>", [4, 0], cluster(9e6, 1e6))
    work = explicit(costs(program, cluster(9e6, 1e6)).work(strategy, Assignment.even([1, 0], TOKENS)))
    per = sum(seconds for (op, _, rank, *_), seconds in work.seconds.items() if op is not Op.UPDATE and rank == 0)
    assert lopsided.seconds == pytest.approx(4 * per)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_spread_ends_earlier(pipelines: list[tuple[int, int]], total: int) -> None:
    def end(counts: tuple[int, ...]) -> int:
        return max((m + p - 1) * s if m else 0 for m, (p, s) in zip(counts, pipelines, strict=True))

    found = spread([p for p, _ in pipelines], [s for _, s in pipelines], total)
    every = (c for c in itertools.product(range(total + 1), repeat=len(pipelines)) if sum(c) == total)
    assert sum(found) == total
    assert end(tuple(found)) == min(map(end, every))


def exposed(text: str, counts: list[int], work: ExplicitWork, link: Interconnect) -> list[list[float]]:
    """Simulate a model of two layers; return what each rank waits for pulls, pushes and activations."""
    strategy = Strategy.parse(text, 2)
    ranks = len(strategy.devices)
    actors = stage_actors(model(2), strategy, counts, ranks)
    found = run_actors(actors, Cluster.homogeneous(ranks, device=SLOW, within_node=link), work)
    streams = (Stream.PULL, Stream.PUSH, Stream.P2P)
    return [[found.exposed_s(rank, stream) for stream in streams] for rank in range(ranks)]


LAYERS = {
    (op, f"layer.{layer}", rank): 1.0 for op in (Op.FORWARD, Op.BACKWARD) for layer in range(2) for rank in range(2)
}


def test_exposed_pulls_by_hand() -> None:
    """Layers' weights arrive after 2 and 4 s, and compute 1 s each; rank 1 sends, and has nothing else to do."""
    pulls = {"layer.0": {(1, 0): 8.0}, "layer.1": {(1, 0): 8.0}}
    assert exposed("2*<tp1,pp1>", [1, 0], ExplicitWork(LAYERS, pulls, {}, {}), Interconnect(4.0, 0.0)) == [
        [3, 0, 0],
        [4, 0, 0],
    ]


def test_exposed_pushes_by_hand() -> None:
    """Layer 1's gradients are sent from 3 to 4 s, during computation; layer 0's from 4 to 7 s, after it has ended."""
    pushes = {"layer.1": {(0, 1): 4.0}, "layer.0": {(0, 1): 12.0}}
    assert exposed("2*<tp1,pp1>", [1, 0], ExplicitWork(LAYERS, {}, pushes, {}), Interconnect(4.0, 0.0)) == [
        [0, 3, 0],
        [0, 7, 0],
    ]


def test_exposed_activations_by_hand() -> None:
    """A forward of 1 s, 2.5 s to the other stage, 2 s there, and 2.5 s back; then its sender commits."""
    assert exposed("<tp1,pp2>", [1], ExplicitWork(LAYERS, {}, {}, {0: 8.0}), Interconnect(4.0, 0.5)) == [
        [0, 0, 7],
        [0, 0, 6],
    ]


def test_the_best_comes_first_and_files_are_written(tmp_path: Path) -> None:
    Cluster((SLOW, SLOW), INSTANT, INSTANT).save(tmp_path / "cluster.yaml")
    given_strategies = ["<tp1,pp1>", "<tp1,pp2>", "2*<tp1,pp1>"]
    options = [part for text in given_strategies for part in ("--strategy", text)]
    files = ("--trace", tmp_path / "trace.json", "--picture", tmp_path / "picture.png")
    sizes = ("--tokens", 24, "--micro-batch", 1)
    result = run("simulate", write(tmp_path), "--cluster", tmp_path / "cluster.yaml", *options, *sizes, *files)
    assert result.exit_code == 0, result.output
    shown = [
        next((s for s in given_strategies if f" {s} " in line), None)
        for line in result.stdout.splitlines()
        if "│" in line
    ]
    assert shown == ["2*<tp1,pp1>", "<tp1,pp2>", "<tp1,pp1>"]
    assert "0-1 100%" in result.stdout  # two pipelines leave no rank idle
    assert "0 100%, 1 0%" in result.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [each for each in events if each["ph"] == "X"]
    assert {each["pid"] for each in spans} == {0, 1}
    assert sum("backward layer.1" in each["name"] for each in spans) == 4  # 96 tokens in micro-batches of 24
    assert all(each["dur"] > 0 for each in spans)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*.partial"))


@thorough
def test_given_micro_batches_are_compared_by_their_tokens(tmp_path: Path) -> None:
    options = ("--strategy", "<[0]x2>", "--strategy", "2*<tp1,pp1>", "--micro-batches", "3", "--devices", 2)
    result = run("simulate", write(tmp_path), *options)
    assert result.exit_code == 0, result.output
    assert "3,3" in result.stdout
    uneven = run("simulate", write(tmp_path), *options, "--home", "1,0")
    assert uneven.exit_code == 0, uneven.output
    assert uneven.stdout != result.stdout  # what is pulled and pushed takes other times
    assert "different numbers of tokens, so compare tokens/s" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cluster", "nowhere.yaml"), "nowhere.yaml"),
        (("--cluster", "x.yaml", "--devices", "2"), "give only one of them"),
        (("--strategy", "<tp2,pp1>"), "strategies[0]: pipeline 0, stage 0: there is no rank 1"),
        (("--micro-batches", "0"), "no pipeline would compute: give at least one pipeline a micro-batch"),
        (("--micro-batches", "1,2"), "--micro-batches '1,2'"),
        (("--strategy", "auto"), "pass strategies with --strategy"),
        (("--home", "1,2"), "home '1,2': 'shares' has 2 numbers, but the run has 1 rank"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("simulate", write(tmp_path), *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


# On COMPUTING only computation takes time, on SENDING only messages: each change of a number shows in one of them.
COMPUTING = Cluster((SLOW, SLOW), INSTANT, INSTANT)
SENDING = Cluster(tuple(Device(1e300, int(1e12), 1e300, node=node) for node in (0, 1)), INSTANT, Interconnect(1e3, 0.0))


def changes(stdout: str, what: str) -> list[str]:
    """Return the last column of the table of one change."""
    table = stdout[stdout.index(f"what if {what}") :]
    return [line.split("│")[-2].strip() for line in table[: table.index("└")].splitlines() if "│" in line]


def test_one_number_changed(tmp_path: Path) -> None:
    options = ["--strategy", "<[0]x2>", "--strategy", "<[1]x2>", "--micro-batches", 2]
    whats = ["device 1 x3", "between_nodes x0.5"]
    flags = [part for what in whats for part in ("--what-if", what)]
    config = write(tmp_path)
    COMPUTING.save(tmp_path / "computing.yaml")
    result = run("simulate", config, "--cluster", tmp_path / "computing.yaml", *options, *flags)
    assert result.exit_code == 0, result.output
    # Of equal strategies the first stays in front, and only the other one runs on device 1.
    assert changes(result.stdout, whats[0]) == ["+0.0%", "+200.0%"]
    assert changes(result.stdout, whats[1]) == ["+0.0%", "+0.0%"]
    SENDING.save(tmp_path / "sending.yaml")
    result = run("simulate", config, "--cluster", tmp_path / "sending.yaml", "--home", "equal", *options, *flags)
    assert changes(result.stdout, whats[0]) == ["+0.0%", "+0.0%"]
    assert changes(result.stdout, whats[1]) == ["+100.0%", "+100.0%"]


@thorough
def test_ranks_that_are_slow_or_lost(tmp_path: Path) -> None:
    COMPUTING.save(tmp_path / "cluster.yaml")
    (tmp_path / "health.yaml").write_text("1: 3.0\n")
    options = ("--cluster", tmp_path / "cluster.yaml", "--strategy", "<[0]x2>", "--strategy", "<[1]x2>")
    given_health = run("simulate", write(tmp_path), *options, "--health", tmp_path / "health.yaml")
    assert given_health.exit_code == 0, given_health.output
    rows = [line.split("│") for line in given_health.stdout.splitlines() if "│" in line]
    seconds = [float(row[3].split()[0]) for row in rows]
    assert seconds[1] == pytest.approx(3 * seconds[0], rel=0.01)
    (tmp_path / "health.yaml").write_text("1: .inf\n")
    lost = run("simulate", write(tmp_path), *options, "--health", tmp_path / "health.yaml")
    assert lost.exit_code == 2
    assert "rank 1 is lost" in " ".join(lost.stderr.split())


def test_micro_batches_of_several_sequences(tmp_path: Path) -> None:
    COMPUTING.save(tmp_path / "cluster.yaml")
    config = write(tmp_path)
    options = ("--cluster", tmp_path / "cluster.yaml", "--strategy", "<[0]x2>", "--tokens", 8, "--efficiency", 1)

    def seconds(*more: object) -> tuple[str, float]:
        result = run("simulate", config, *options, *more)
        assert result.exit_code == 0, result.output
        (row,) = (line.split("│") for line in result.stdout.splitlines() if "│" in line)
        return row[2].strip(), float(row[3].split()[0])

    count, four = seconds("--sequences", 12, "--micro-batch", 4)
    assert count == "3"
    assert seconds("--micro-batches", 3, "--micro-batch", 4) == ("3", four)
    assert seconds("--sequences", 12)[1] == pytest.approx(
        four, rel=0.01
    )  # computing takes its operations, and no start
    assert seconds("--micro-batches", 3, "--tokens", 32)[1] > 1.01 * four  # one sequence of 32 attends to more keys
    for wrong, why in (
        (("--sequences", 10, "--micro-batch", 4), "--sequences 10 cannot be split into micro-batches of 4"),
        (("--sequences", 10, "--micro-batches", "2"), "--micro-batches and --sequences both set the size of a step"),
        (("--lengths", config, "--micro-batch", 2), "--lengths draws a mini-batch: omit"),
    ):
        refused = run("simulate", config, *options[:-4], *wrong)
        assert refused.exit_code == 2
        assert why in " ".join(refused.stderr.split())


def test_it_says_where_its_seconds_come_from(tmp_path: Path) -> None:
    config = write(tmp_path)
    datasheet_priced = run("simulate", config, "--strategy", "<tp1,pp1>", "--devices", 1)
    assert "computation is not measured: datasheet" in datasheet_priced.stdout
    assert "up to 66%" in datasheet_priced.stdout
    runs, error = PUBLISHED["without pipelines"]
    stated = f"the mean error of such predictions is {error:.0%} on {runs} published runs without pipelines"
    assert stated in datasheet_priced.stdout
    half = run("simulate", config, "--strategy", "<tp1,pp1>", "--devices", 1, "--efficiency", 0.225)
    assert "22.5%" in half.stdout or "22%" in half.stdout
    assert f"; {FLAT}\n" in half.stdout
    measured(blocks=("embed", "layer", "layer", "head"), sizes=ModelSizes.rough((9, 9, 9, 9), 8, 4)).save(
        tmp_path / "profile.json"
    )
    by_profile = run(
        *("simulate", config, "--strategy", "<tp1,pp1>", "--devices", 1, "--profile", tmp_path / "profile.json"),
        "--critical-path",
    )
    assert by_profile.exit_code == 0, by_profile.output
    assert "computation as measured: here" in by_profile.stdout
    assert "computes 1 forward and 1 backward of layers 0-1" in by_profile.stdout  # the critical path


def test_a_mini_batch_of_drawn_lengths(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("\n".join(str(n) for n in (5, 40, 9, 33, 21, 60, 12)))
    options = ("--strategy", "2*<tp1,pp1>", "--devices", 2, "--lengths", tmp_path / "lengths.txt")
    result = run("simulate", write(tmp_path), *options)
    assert result.exit_code == 0, result.output
    assert "2*<tp1,pp1>" in result.stdout
    both = run("simulate", write(tmp_path), *options, "--tokens", 24)
    assert both.exit_code == 2
    assert "--lengths draws a mini-batch: omit" in both.stderr


L4 = "{memory_bytes: 24e9, memory_bytes_per_s: 3e11, flops_per_s: 1e14}"
LINK = "{bytes_per_s: 1e9, latency_s: 1e-5}"
TWO_L4 = f"types: {{l4: {L4}}}\nnodes: [{{type: l4, devices: 2, inner: {LINK}, outer: {LINK}}}]"


@pytest.mark.parametrize(
    ("cluster_text", "arguments", "sentence"),
    [
        (
            f"types: {{l4: {L4}}}\nnodes: [{{type: l40, devices: 2, inner: {LINK}, outer: {LINK}}}]",
            (),
            "nodes[0]: unknown device type 'l40': use l4",
        ),
        (
            f"types: {{l4: {L4}}}\nnodes: [{{type: l4, devices: 2, inner: {LINK}}}]",
            (),
            "nodes[0]: missing field 'outer'",
        ),
        (f"devices: [{L4}, {L4}]\nwithin_node: {LINK}", (), "cluster: missing field 'between_nodes'"),
        (
            TWO_L4,
            ("--profile", "profile.json"),
            "device type 'l4' was not measured",
        ),
        (
            TWO_L4,
            ("--what-if", "device 7 x2"),
            "use one of the cluster's ranks, 0 to 1",
        ),
        (
            TWO_L4,
            ("--what-if", "type h100 x2"),
            "use one of the cluster's types, l4",
        ),
        (
            TWO_L4,
            ("--what-if", "everything x2"),
            "scale 'within_node' or 'between_nodes'",
        ),
        (
            TWO_L4,
            ("--what-if", "device 0 twice"),
            "is not a known change",
        ),
        (
            TWO_L4,
            ("--what-if", "device 0 x0.5"),
            "give a factor of at least 1",
        ),
        (
            TWO_L4,
            ("--health", "health.yaml"),
            "health.yaml: rates: rank 0 has 0.5: give a rate of at least 1",
        ),
    ],
)
def test_what_does_not_fit_the_cluster_is_a_sentence(
    tmp_path: Path, cluster_text: str, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "cluster.yaml").write_text(cluster_text)
    (tmp_path / "health.yaml").write_text("0: 0.5\n")
    measured(type="h100").save(tmp_path / "profile.json")
    files = [tmp_path / text if text.endswith((".json", ".yaml")) else text for text in arguments]
    result = run("simulate", write(tmp_path), "--strategy", "<tp1,pp1>", "--cluster", tmp_path / "cluster.yaml", *files)
    assert result.exit_code == 2, result.output
    assert not result.stdout, "nothing is simulated before"
    assert sentence in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_numbers_suit_their_size() -> None:
    assert [seconds_text(s) for s in (0, 2e-6, 0.0415, 12.3456)] == ["0", "2 us", "41.5 ms", "12.3 s"]
    assert [bytes_text(n) for n in (0, 999, 1.5e3, 2.25e9, 3e13)] == ["0", "999 B", "1.5 kB", "2.25 GB", "30 TB"]
    assert [counts_text(c) for c in ([4], [2, 2], [2, 2, 2], [8, 8, 8, 1])] == ["4", "2,2", "3*2", "3*8,1"]


def test_help_teaches_with_an_example() -> None:
    assert "hydragraph simulate examples/demo.yaml --devices 4" in " ".join(run("simulate", "--help").stdout.split())


def test_options_replace_strategies_and_home_without_the_checks_of_a_run(tmp_path: Path) -> None:
    config = write(tmp_path, strategies="auto", ranks=2, elastic={"replan": True, "copies": 2})
    result = run("simulate", config, "--home", "equal")
    assert result.exit_code == 0, result.output
    assert "2*<tp1,pp1>" in result.stdout
