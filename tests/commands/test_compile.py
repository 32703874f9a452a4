"""`hydragraph compile`: its files read back unchanged, and files that do not fit are reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
from typer.testing import Result

import hydragraph as hg
from hydragraph.commands import compile_ahead
from hydragraph.commands.compile import _compiled, _tokens
from hydragraph.commands.compile_files import Summary
from hydragraph.frontend.compiled_folder import variant_cache
from hydragraph.ir.program import Program
from hydragraph.ir.shared_programs_text import program_texts
from hydragraph.passes import graph_passes, variants
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import open_tokens, prepare
from hydragraph.train.model import adapted, build_model, skeleton
from tests.commands.tiny import LOPSIDED, run, write
from tests.thorough import thorough

STRATEGIES = [*LOPSIDED, "<[0,1]x2sr>"]


def program_of(config: Path) -> Program:
    settings = TrainConfig.load(config)
    return hg.capture(skeleton(settings.model, settings.data.vocab_size))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A config, the folder that it was compiled to, and what was printed."""
    folder = tmp_path_factory.mktemp("compiled")
    config = write(folder, ranks=2, strategies=STRATEGIES)
    return config, folder / "out", run("compile", config, "--output", folder / "out", "--micro-batches", "3")


def test_strategies_and_rank_programs_read_back(compiled: tuple[Path, Path, Result]) -> None:
    config, folder, result = compiled
    assert result.exit_code == 0, result.output
    assert result.stdout.count("verified") == len(STRATEGIES)
    program, summary = program_of(config), Summary.load(folder)
    assert summary.fingerprint == program.fingerprint
    for text, record in zip(STRATEGIES, summary.strategies, strict=True):
        strategy = hg.Strategy.load(folder / "strategies" / record.folder / "strategy.yaml")
        assert strategy == hg.Strategy.parse(text, 2)
        programs = hg.lower(program, strategy, record.micro_batches, ranks=2)
        assert record.instructions == sum(len(each.instructions) for each in programs)
        files = (folder / "strategies" / record.folder).glob("*.txt")
        assert {file.name: file.read_text() for file in files} == program_texts(programs.programs)
    folders = {each.name for each in (folder / "strategies").iterdir() if each.is_dir()}
    assert folders == {s.folder for s in summary.strategies}


def test_the_summary_names_what_is_there(compiled: tuple[Path, Path, Result]) -> None:
    config, folder, result = compiled
    summary = Summary.load(folder)
    kinds = {"<[0]x1,[1]x1>": ["tp1"], "<[0,1]x2>": ["tp2"], "<[0,1]x2sr>": ["tp2sr"]}
    assert {v.name for v in summary.variants} == {
        f"{block}.{kind}" for block in ("embed", "layer.0", "head") for each in kinds.values() for kind in each
    }
    for text, record in zip(STRATEGIES, summary.strategies, strict=True):
        assert {name.rpartition(".")[2] for name in record.variants} == set(kinds[text])
        assert (record.problem, record.micro_batches) == ("", (3,))
        assert record.pull_bytes > 0
        assert record.push_bytes > 0
    files = {f"{v.name}.{kind}" for v in summary.variants for kind in ("forward.py", "backward.py", "json")}
    assert {each.name for each in (folder / "graphs").iterdir()} == files
    layer = {v.name: v for v in summary.variants if v.template == summary.variants[1].template}
    assert layer["layer.0.tp1"].blocks == ("layer.0", "layer.1")
    assert layer["layer.0.tp2"].indices == (0, 1)
    assert layer["layer.0.tp2sr"].saved_bytes_per_token == 0  # a block that recomputes saves its inputs only
    assert layer["layer.0.tp1"].saved_bytes_per_token > layer["layer.0.tp2"].saved_bytes_per_token > 0
    assert all(v.forward_nodes > 0 and v.backward_nodes > 0 and v.name in result.stdout for v in summary.variants)
    text = (folder / "program.txt").read_text()
    assert text.startswith(str(program_of(config)))
    assert all(f"template {v.template}\n" in text for v in summary.variants)


def test_the_summary_is_plain_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Graphs that are read from a cache took no passes: neither the disk nor this process has any.
    monkeypatch.setattr(variant_cache, "GRAPHS", str(tmp_path / "graphs"))
    monkeypatch.setattr(variants, "_shared", WeakValueDictionary())
    result = run("compile", write(tmp_path), "--strategy", "<[0]x2>", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out" / "summary.json").read_text())
    kinds = {"model": str, "layers": int, "parameters": int, "ranks": int, "backend": str, "capture_seconds": float}
    assert {name: type(record[name]) for name in kinds} == kinds
    assert (record["ranks"], record["backend"], record["layers"]) == (1, "eager", 2)
    assert all(isinstance(each["indices"], list) and isinstance(each["seconds"], float) for each in record["variants"])
    passes = [list(each["pass_seconds"]) for each in record["variants"]]
    assert any(passes)
    assert all(names[0] == "shard" and "differentiate" in names for names in passes if names)
    assert all(value > 0 for each in record["variants"] for value in each["pass_seconds"].values())

    def traced(*_: object) -> None:
        raise AssertionError("a graph is traced again")

    monkeypatch.setattr(variants, "_shared", WeakValueDictionary())  # as in another process
    monkeypatch.setattr(graph_passes, "differentiate", traced)
    again = run("compile", tmp_path / "config.yaml", "--strategy", "<[0]x2>", "--output", tmp_path / "out")
    assert again.exit_code == 0, again.output


@thorough
def test_a_later_compile_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    config, out = write(tmp_path), tmp_path / "out"
    assert run("compile", config, "--output", out, "--ranks", 2, "--strategy", "2*<tp1,pp1>").exit_code == 0
    assert run("compile", config, "--output", out, "--ranks", 2, "--strategy", "<tp2,pp1>").exit_code == 0
    assert [s.strategy for s in Summary.load(out).strategies] == [str(hg.Strategy.parse("<tp2,pp1>", 2))]
    assert sum(each.is_dir() for each in (out / "strategies").iterdir()) == 1
    assert {each.name.split(".tp")[1][0] for each in (out / "graphs").iterdir()} == {"2"}
    refused = run("compile", config, "--output", tmp_path)
    assert refused.exit_code == 2
    assert "contains other files: pass a new folder" in refused.stderr
    assert config.exists()


def test_strategies_that_do_not_fit_stand_beside_those_that_do(tmp_path: Path) -> None:
    hg.Strategy.parse("<[0]x2,[1]x1> + <[2]x3>", 3).save(tmp_path / "three.yaml")
    expected = {
        "2*<tp4,pp1>": "degree 4 (its number of devices) does not divide 2 attention heads; use 1 or 2 devices",
        "<[0]x2> + <[9]x2>": "there is no rank 9, only ranks 0 to 7",
        "<tp1": "strategy text: expected ','",
        "<tp2,pp1>": "--micro-batches '2,1' has 2 numbers, but the number of pipelines is 1",
        str(tmp_path / "three.yaml"): "2 + 1 = 3 layers, but the model has 2; remove 1 in every pipeline",
        "<tp2,pp1> + <tp1,pp2>": "",
    }
    options = [part for text in expected for part in ("--strategy", text)]
    config, out = write(tmp_path), tmp_path / "out"
    result = run("compile", config, *options, "--ranks", 8, "--output", out, "--micro-batches", "2,1")
    assert result.exit_code == 1
    assert result.stdout.count("DOES NOT FIT") == len(expected) - 1
    assert result.stdout.count("verified") == 1
    for sentence, record in zip(expected.values(), Summary.load(out).strategies, strict=True):
        assert sentence in record.problem
        assert bool(record.problem) is bool(sentence)
        assert bool(record.folder) is bool(record.variants) is not bool(sentence)
        assert f"hydragraph: {record.strategy}: {record.problem}" in result.stderr or not sentence
    assert sum(each.is_dir() for each in (out / "strategies").iterdir()) == 1


def test_a_schedule_that_inductor_refuses_is_not_verified() -> None:
    compiler: Any = SimpleNamespace(backend="inductor")
    compiled = _compiled(compiler, "<tp1,pp2> zb-h1", 2, "1", None)
    assert "splits each backward in two" in compiled.record.problem


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--set", 'plan={"choose": true, "profile": "p.json"}', "--set", 'strategies=["auto"]'),
            "'strategies: auto' is resolved only when training starts: pass strategies with --strategy",
        ),
        (("--backend", "fast"), "'backend' is 'fast': use 'inductor' or 'eager'"),
        (("--home", "1,2"), "home '1,2': 'shares' has 2 numbers, but the run has 1 rank"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    result = run("compile", write(tmp_path), "--output", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


@thorough
def test_what_travels_follows_from_who_owns_it(tmp_path: Path) -> None:
    config, out = write(tmp_path), tmp_path / "out"
    result = run("compile", config, "--ranks", 2, "--strategy", "<[1]x2>", "--home", "1,0", "--output", out)
    assert result.exit_code == 0, result.output
    (record,) = Summary.load(out).strategies
    elements = sum(bucket.size for bucket in program_of(config).buckets)
    assert (record.pull_bytes, record.push_bytes) == (4 * elements, 4 * elements)  # rank 1 computes, rank 0 owns


@thorough
def test_unequal_shards_are_variants_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--set", "model.config.vocab_size=513", "--ranks", 2, "--strategy", "<tp2,pp1>", "--output", out)
    result = run("compile", write(tmp_path), *options)
    assert result.exit_code == 0, result.output
    found = {v.name: v.indices for v in Summary.load(out).variants}
    assert found["layer.0.tp2"] == (0, 1)
    assert {found[f"{block}.tp2.rank{i}"] for block in ("embed", "head") for i in (0, 1)} == {(0,), (1,)}
    assert "[256, 16]" in (out / "graphs" / "head.tp2.rank0.forward.py").read_text()
    assert "[257, 16]" in (out / "graphs" / "head.tp2.rank1.forward.py").read_text()


@thorough
def test_a_model_that_no_memory_here_would_hold(tmp_path: Path) -> None:
    """Two layers with the dimensions of Llama 70B, of 16 GB in fp32 with their embedding and head."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = write(tmp_path, dtype="bfloat16")
    changes = {"vocab_size": 128256, "num_hidden_layers": 2, **sizes}
    options = [part for name, size in changes.items() for part in ("--set", f"model.config.{name}={size}")]
    out = tmp_path / "out"
    result = run("compile", config, *options, "--ranks", 64, "--strategy", "4*<tp8,pp2>", "--output", out)
    assert result.exit_code == 0, result.output
    attention, mlp = 2 * 8192 * 8192 + 2 * 1024 * 8192, 3 * 8192 * 28672
    summary = Summary.load(out)
    assert summary.parameters == 2 * 128256 * 8192 + 2 * (attention + mlp + 2 * 8192) + 8192
    assert [v.name for v in summary.variants] == ["embed.tp8", "layer.0.tp8", "head.tp8"]
    assert len(list((out / "strategies" / summary.strategies[0].folder).glob("program_*.txt"))) == 2  # of 64 ranks


@thorough
def test_inductor_compiles_what_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []

    class Recorder(Variants):
        def __init__(self, program: Any, partitioner: str = "min_cut", backend: str = "eager", *args: Any, **more: Any):
            super().__init__(program, partitioner, "eager", *args, **more)
            self.asked = backend

        def get(self, block: Any, part: StagePart) -> Variant:
            asked.append((self.asked, block.name, bool(part.recompute)))
            return super().get(block, part)

    monkeypatch.setattr(compile_ahead, "Variants", Recorder)
    monkeypatch.setattr("hydragraph.passes.compile_with_inductor.missing_compiler", lambda device: None)
    out = tmp_path / "out"
    result = run("compile", write(tmp_path), "--strategy", "<[0]x2r>", "--output", out, "--backend", "inductor")
    assert result.exit_code == 0, result.output
    blocks = [("embed", True), ("layer.0", True), ("head", True)]
    # Once to compile, and what a run starts from once more, of what is compiled.
    assert list(dict.fromkeys(asked)) == [(backend, *block) for block in blocks for backend in ("eager", "inductor")]
    assert Summary.load(out).backend == "inductor"
    # Inductor's runs have no logits, and what is read is what Inductor was given.
    assert "head_loss" in (out / "graphs" / "head.tp1r.forward.py").read_text()


def test_a_folder_has_the_adapters_of_its_run(tmp_path: Path) -> None:
    lora = {"lora": {"r": 4, "targets": ["q_proj"]}}
    config, out = write(tmp_path, adapter=lora, strategies=["<tp1,pp1>"], check="off"), tmp_path / "out"
    result = run("compile", config, "--output", out)
    assert result.exit_code == 0, result.output
    settings = TrainConfig.load(config)
    model = adapted(build_model(settings.model, 300, 0, settings.seed), settings.adapter, settings.seed)
    program = hg.capture(model, check="off", compiled=out)
    assert {"lora_A" in name or "lora_B" in name for name, p in program.parameters.items() if p.trainable} == {True}


def test_a_new_model_has_the_vocabulary_that_was_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig.load(write(tmp_path), ["data.vocab_size=20000"])  # more than there are words for
    model = dict(config.model.config or {})
    model.pop("vocab_size", None)
    config = replace(config, model=replace(config.model, config=model))
    assert _tokens(config) == (20000, 0)
    assert "compile again, or set model.config.vocab_size" in capsys.readouterr().err
    tokens = open_tokens(config, prepare(config))
    assert _tokens(config) == (tokens.vocabulary, tokens.end_of_text)
    assert tokens.vocabulary < 20000
    assert not capsys.readouterr().err


def test_help_teaches_with_an_example() -> None:
    assert "hydragraph compile examples/demo.yaml --strategy" in " ".join(run("compile", "--help").stdout.split())
