"""`hydragraph show`: the passes, the program, and the programs of the ranks."""

from __future__ import annotations

from pathlib import Path

from tests.commands.tiny import LOPSIDED, run, write


def test_show_lists_the_passes() -> None:
    result = run("show", "--passes")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    passes = [line.split()[1] for line in lines if line[0].isdigit()]
    assert passes[:4] == ["shard", "fuse_head", "differentiate", "accumulate"]
    assert passes[4:7] == ["sums_in_pieces", "overlap_collectives", "compile"]
    assert passes[7:10] == ["order", "stream", "overlap"]
    assert [line.partition(":")[0] for line in lines if not line[0].isdigit()] == ["graph passes", "program passes"]
    assert all(len(line.split()) > 4 for line in lines), "each says what it does"


def test_show_prints_each_block_after_each_graph_pass(tmp_path: Path) -> None:
    config = write(tmp_path, ranks=2)
    cut = run("show", config, "--passes", "--strategy", LOPSIDED[1], "--rank", "1")
    assert cut.exit_code == 0, cut.stderr
    assert "\n# layer.1" not in cut.stdout, "layers of one template are shown once"
    layer = cut.stdout.partition("# layer.0, place 1 of tp 2\n")[2].partition("\n# ")[0]
    steps = [line.split()[2] for line in layer.splitlines() if line.startswith("## after")]
    assert steps == ["shard", "differentiate", "differentiate", *["accumulate"] * 2, *["overlap_collectives"] * 2]
    assert "+2 hydragraph.tp_sum.default" in layer
    assert "hydragraph.tp_sum.default(" in layer, "its text is printed, too"
    assert "overlap_collectives" in layer.rpartition("## after")[2], "the last pass comes last"
    instructions = cut.stdout.partition("# rank 1 of 2 under ")[2]
    steps = [line.split()[2] for line in instructions.splitlines() if line.startswith("## after")]
    assert steps == ["order", "stream", "overlap", "offload", "retain"]
    ordered, _, rest = instructions.partition("## after overlap")
    assert "forward layer.0 [0]" in ordered
    assert "link" not in ordered, "order places no exchange"
    assert "free s.layer.0.0" in rest.partition("## after retain")[2]
    assert "free s.layer.0.0" not in rest.partition("## after retain")[0]
    nobody = run("show", config, "--passes", "--rank", "9")
    assert nobody.exit_code != 0
    assert "'rank' is 9: the world has ranks 0 to 1" in nobody.stderr


def test_show_prints_the_program_and_the_ranks(tmp_path: Path) -> None:
    config = write(tmp_path, ranks=2)
    program = run("show", config)
    assert program.exit_code == 0, program.stderr
    assert "layer.1" in program.stdout
    ranks = run("show", config, "--strategy", LOPSIDED[0], "--micro-batches", "3")
    assert ranks.exit_code == 0, ranks.stderr
    assert "rank 0 of 2" in ranks.stdout
    assert "rank 1 of 2" in ranks.stdout
    one = run("show", config, "--strategy", LOPSIDED[0], "--rank", "1")
    assert "rank 0 of 2" not in one.stdout
    assert "rank 1 of 2" in one.stdout


def test_a_view_of_automatic_strategies_is_of_data_parallelism(tmp_path: Path) -> None:
    result = run("show", write(tmp_path, ranks=2, strategies="auto"), "--memory")
    assert result.exit_code == 0, result.output
    assert "this command uses plain data parallelism instead" in result.stderr
    assert "2*<tp1,pp1>" in result.stdout


def test_the_program_of_a_run_with_adapters_trains_only_these(tmp_path: Path) -> None:
    config = write(tmp_path, adapter={"lora": {"r": 4}})
    result = run("show", config)
    assert result.exit_code == 0, result.output
    assert "trainable=512" in result.stdout
    passes = run("show", config, "--passes")
    assert passes.exit_code == 0, passes.output
    assert "\n# layer.0, place 0 of tp 1" in passes.stdout
    assert "lora_a_default_weight" in passes.stdout
