"""`hydragraph show DIR`: it describes what a folder was compiled from; mistakes give one-sentence errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import hydragraph as hg
from hydragraph.commands.show_folder import ShownFolder, ranks_text, shortened, unknown
from hydragraph.commands.show_memory import walk
from hydragraph.commands.show_schedule import schedule
from hydragraph.commands.show_traffic import traffic_by_kind
from hydragraph.cost.collective_bytes import collective_bytes
from hydragraph.cost.compiled_blocks import CompiledBlocks
from hydragraph.cost.footprint import MicroBatch
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.instruction import Op
from hydragraph.ir.rank_program import to_text
from hydragraph.passes.variants import Variants
from hydragraph.spec.home import Home
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.train.config import TrainConfig
from hydragraph.train.model import skeleton
from tests.commands.tiny import run, write
from tests.cost.walked import rank_memory
from tests.thorough import thorough

STRATEGIES = ["<tp2,pp1> + <tp1,pp2>", "<[0,1]x1,[2,3]x1>", "<[0,1]x2sr>"]
HOME = "3,2,2,1"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three strategies on four ranks; rank 0 owns most of the state."""
    path = tmp_path_factory.mktemp("shown")
    config = write(path, ranks=4, strategies=STRATEGIES, home=HOME)
    result = run("compile", config, "--output", path / "out", "--micro-batches", "3")
    assert result.exit_code == 0, result.output
    return path / "out"


def shown(folder: Path, *arguments: object) -> str:
    result = run("show", folder, *arguments)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100 or "--rank" in arguments
    return result.stdout


def test_an_overview_says_what_is_there(folder: Path) -> None:
    lines = shown(folder).splitlines()
    assert lines[0].startswith("LlamaForCausalLM: 2 layers, ")
    assert lines[0].endswith("compiled for 4 ranks")
    assert lines[3] == f"  1. {hg.Strategy.parse(STRATEGIES[0], 2)}"
    assert "3,3 micro-batches, " in lines[4]
    assert "3 kinds of rank; pulls" in lines[4]
    kinds = shown(folder, "--strategy", "1").splitlines()
    assert [line.rpartition(", ")[2] for line in kinds[1:]] == ["ranks 0-1", "rank 2", "rank 3"]


def test_nothing_is_traced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a folder needs no model")

    monkeypatch.setattr("hydragraph.frontend.capture.capture", refuse)
    monkeypatch.setattr("hydragraph.train.model.skeleton", refuse)
    text = shown(folder, "--memory", "--traffic", "--schedule", "--diff", "2", "--parameter", NORM)
    assert "under <tp2,pp1> + <tp1,pp2>@" in text


def test_a_rank_s_program_is_its_full_text(folder: Path) -> None:
    program = _program(folder)
    for number, text in enumerate(STRATEGIES, start=1):
        programs = hg.lower(program, hg.Strategy.parse(text, 2), [3] * (text.count(" + ") + 1), ranks=4)
        for rank in (0, 3):
            assert shown(folder, "--strategy", number, "--rank", rank) == to_text(programs[rank]) + "\n"


def _program(folder: Path) -> hg.Program:
    settings = TrainConfig.load(folder.parent / "config.yaml")
    return hg.capture(skeleton(settings.model, settings.data.vocab_size), check="off")


@thorough
def test_memory_and_traffic_are_those_of_the_compiled_graphs(folder: Path) -> None:
    program = _program(folder)
    blocks = CompiledBlocks(program, Variants(program, added=True).get)
    opened = ShownFolder.open(folder)
    home = Home.parse(HOME)
    for each in opened.strategies:
        batches = [[MicroBatch(640, 1)] * 3 for _ in each.strategy.pipelines]
        for rank in range(4):
            exact = rank_memory(blocks, each.strategy, batches, rank, 4, home=home)
            found = walk(each, rank, 640).peak()
            assert found == exact
        by_kind = traffic_by_kind(each, 640)
        assert by_kind["pull"].total == each.record.pull_bytes
        assert by_kind["push"].total == each.record.push_bytes
    # One rank's hidden state, of 16 floats per token, is sent to the next stage's ranks, and a gradient comes back.
    first, second, third = (traffic_by_kind(each, 640) for each in opened.strategies)
    assert first["pp"].pairs == {(2, 3): 3 * 640 * 16 * 4, (3, 2): 3 * 640 * 16 * 4}
    assert set(second["pp"].pairs) == {(0, 2), (1, 3), (2, 0), (3, 1)}
    assert third["pp"].total == 0
    assert set(first["tp"].pairs) == {(0, 1), (1, 0)}
    assert set(second["tp"].pairs) == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_sums_of_tensor_parallel_ranks_are_those_of_the_graphs(folder: Path) -> None:
    """A layer adds up its hidden state twice forward and twice backward; of two ranks each sends one of it each time.

    Sequence parallelism gathers and scatters instead: half a hidden state each time, and the recomputed forward again.
    """
    opened = ShownFolder.open(folder)
    block, part = opened.program.blocks[1], StagePart(StageKind(2))
    hidden = 16 * 4
    assert collective_bytes(opened.variants.get(block, part), part, MicroBatch(640, 1)) == 640 * 4 * hidden
    assert opened.blocks.hidden_bytes == hidden


def test_the_schedule_is_the_programs(folder: Path, tmp_path: Path) -> None:
    opened = ShownFolder.open(folder)
    for each in opened.strategies:
        for row in schedule(each):
            for rank in row.ranks:
                blocks = opened.program.outline.blocks
                done = [i for i in each.programs[rank].instructions if i.op in (Op.FORWARD, Op.BACKWARD)]
                tasks = dict.fromkeys((i.work, i.micro_batch) for i in done if i.target in blocks)
                assert [(task.work, task.micro_batch) for task in row.tasks] == list(tasks)
            assert all(one.end <= two.begin for one, two in zip(row.tasks, row.tasks[1:], strict=False))
    text = shown(folder, "--schedule", "--strategy", "2", "--output", tmp_path / "grid.svg")
    assert text.splitlines()[2:5] == [
        "  24 units in all, 1 per column; the ranks that work are idle 25% of the time",
        "  pipeline 0 stage 0 ranks 0-1 F0F1....B0--F2B1--..B2--",
        "  pipeline 0 stage 1 ranks 2-3 ..F0B0--F1B1--F2B2--....",
    ]
    assert (tmp_path / "grid.svg").read_text().startswith("<?xml")
    one = shown(folder, "--schedule", "--strategy", "2", "--rank", "3", "--output", tmp_path / "one.svg")
    assert one.splitlines()[2:-1] == [
        "  24 units in all, 1 per column; rank 3 is idle 25% of the time",
        "  pipeline 0 stage 1 ranks 2-3 ..F0B0--F1B1--F2B2--....",
    ]
    assert "stage 0" not in (tmp_path / "one.svg").read_text()


def test_who_holds_a_parameter(folder: Path) -> None:
    text = shown(folder, "--parameter", "model.embed_tokens.weight", "--strategy", "2")
    lines = text.splitlines()
    assert "sharded along dimension 0" in lines[1]
    owned = HomeLayouts(Home.parse(HOME), 4).of(ShownFolder.open(folder).program.buckets[0])
    ends = [f"{int(end):,}" for end in owned.hi]  # ranks 1 and 2 own equally much
    assert lines[3:6] == [
        f"  rank 0: elements [0, {ends[0]}), 7.2 kB of weights",
        f"  ranks 1-2: 1,200 each, elements [{ends[0]}, {ends[2]}), 4.8 kB of weights",
        f"  rank 3: elements [{ends[2]}, {ends[3]}), 2.4 kB of weights",
    ]
    assert ends[3] == "4,800"
    assert lines[-1] == "  pipeline 0, stage 0: ranks 0-1 [150, 16] each"
    one = shown(folder, "--parameter", "model.embed_tokens.weight", "--strategy", "2", "--rank", "1")
    assert "rank 1 has part 1 of 2: [150, 16], elements [2,400, 4,800), 9.6 kB" in one
    assert "this rank does not use the parameter" in shown(
        folder, "--parameter", NORM, "--strategy", "2", "--rank", "0"
    )


def test_differences_are_told_in_words(folder: Path, tmp_path: Path) -> None:
    text = shown(folder, "--strategy", "1", "--diff", "2")
    assert "  pipelines: 2 -> 1\n" in text
    assert "  rank 3: stage 1, layer 1, tp 1 -> stage 1, layer 1, tp 2\n" in text
    assert "no differences in placement" in shown(folder, "--strategy", "1", "--diff", "1")
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert "no differences in model, graphs, strategies and programs" in shown(folder, "--diff", other)
    name = ShownFolder.open(folder).strategies[0].record.folder
    file = other / "strategies" / name / "program_1.txt"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:-1]) + "\n")
    (other / "graphs" / "head.tp2.forward.py").unlink()
    summary = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps({**summary, "torch": "1.0"}))
    text = shown(folder, "--diff", other)
    assert "-> 1.0\n" in text
    assert "  graphs gone: head.tp2.forward.py\n" in text
    assert f"    {name}/program_1.txt: 0 lines added, 1 removed\n" in text


@thorough
def test_a_config_is_compiled_for_what_only_a_folder_tells(folder: Path) -> None:
    config = folder.parent / "config.yaml"
    arguments = ("--strategy", STRATEGIES[1], "--micro-batches", "3", "--set", "check=off")
    result = run("show", config, "--schedule", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout == shown(folder, "--schedule", "--strategy", "2")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--rank", "4"), "--rank 4 does not exist: give a rank from 0 to 3"),
        (("--parameter", "model.embed_token.weight"), "did you mean 'model.embed_tokens.weight'"),
        (("--parameter", "xyz"), "no parameter 'xyz': the model has model.embed_tokens.weight, "),
        (("--strategy", "<tp2,pp3>", "--memory"), "no strategy '<tp2,pp3>': did you mean "),
        (("--diff", "nothing"), "no strategy 'nothing': "),
        (("--output", "x.png"), "--output names the picture of --schedule: give both options"),
        (("--schedule", "--output", "x.pdf"), "--output x.pdf: name a file that ends in .png or .svg"),
        (("--passes",), "--passes needs the YAML file of a run"),
        (("--set", "ranks=2"), "--set changes a config, not a folder: compile again"),
    ],
)
def test_a_mistake_is_a_sentence(folder: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("show", folder, *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("summary.json", "contains no summary.json: pass a folder that hydragraph compile --output wrote"),
        ("manifest.json", "its manifest.json cannot be read (No such file or directory); write the folder again"),
        ("program.json", "program.json cannot be read (No such file or directory); write the folder again"),
        ("strategies/*/strategy.yaml", "strategy.yaml is missing: write the folder again with hydragraph compile"),
    ],
)
def test_a_file_that_is_missing_is_named(folder: Path, tmp_path: Path, name: str, sentence: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    for file in broken.glob(name):
        file.unlink()
    result = run("show", broken, "--schedule", "--memory", "--rank", "0")
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_lists_are_cut_and_names_are_near() -> None:
    assert list(shortened(["a", "b", "c"], rows=2, more=" letters")) == ["a", "b", "  ... and 1 more letters"]
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(0, 100, 2)) == "ranks 0..98 (50 of them)"
    assert (
        unknown("dog", "xyz", ["a", "b", "c", "d", "e"], "there are") == "no dog 'xyz': there are a, b, c, d and 1 more"
    )


def test_help_teaches_with_an_example() -> None:
    text = " ".join(run("show", "--help").stdout.split())
    assert "hydragraph show compiled --memory" in text
