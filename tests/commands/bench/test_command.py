"""`hydragraph bench` on the command line: what it prints and writes, and that a mistake is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hydragraph import cli


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])


def test_kernels_writes_what_is_asked_for_and_report_joins_it(tmp_path: Path) -> None:
    files = {name: tmp_path / f"kernels.{name}" for name in ("csv", "json", "markdown")}
    files["picture"] = tmp_path / "kernels.png"
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = bench("kernels", "linear_cross_entropy", "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    assert "% of ceiling" in result.stdout
    assert "torch.compile was not measured: pass --compiled to measure it." in result.stdout
    assert "not measured" in result.stdout
    assert files["csv"].read_text().splitlines()[1].startswith('linear_cross_entropy,"T 128, E 64, V 1024",eager,')
    assert files["picture"].read_bytes().startswith(b"\x89PNG")
    assert "## Targets, on one H200" in files["markdown"].read_text()
    result = bench("report", files["json"], files["json"], "--markdown", tmp_path / "all.md", "--fact", "Mine.")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "all.md").read_text()
    assert page.startswith("# Benchmarks on CPU")
    assert "- Mine.\n" in page
    assert page.count("## Kernels on CPU") == 2


def test_link_of_a_push_and_a_pull() -> None:
    result = bench("link", "--from", "2*<tp1,pp1>", "--to", "<tp2,pp1>", "--model", "tiny", "--no-measure")
    assert result.exit_code == 0, result.output
    assert "push: 2*<tp1,pp1> -> home: MB from rank (row) to rank (column)" in result.stdout
    assert "pull: home -> <tp2,pp1>" in result.stdout
    assert "simulated" in result.stdout
    assert "measured" not in result.stdout
    assert "Weights are pulled in bfloat16, and gradients are pushed in fp32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("kernels", "adam", "--device", "cpu"), "unknown kernel 'adam': choose from varlen_attention"),
        (("kernels", "--device", "warp"), "--device warp:"),
        (("link", "--to", "home", "--model", "tiny"), "--from home --to home has no traffic"),
        (("link", "--to", "<tp3,pp1>", "--model", "tiny"), "degree 3 (its number of devices) does not divide 4"),
        (("link", "--to", "8*<tp1,pp1>", "--model", "tiny", "--measure"), "--measure runs up to 4 local ranks, not 8"),
        (("link", "--model", "nowhere"), "--model nowhere: name one of tiny, small, 1b, 7b"),
        (("link", "--dtype", "int8"), "--dtype int8: use bfloat16 or float32"),
        (("step", "--model", "13b", "--device", "cpu"), "--model 13b: use one of tiny, small, 1b, 7b"),
        (("report", "nowhere.json", "--markdown", "x.md"), "nowhere.json"),
    ],
)
def test_a_mistake_is_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("kernels", "hydragraph bench kernels adamw slice_copy --device cpu"),
        ("link", "hydragraph bench link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b"),
        ("step", "hydragraph bench step --model small --tokens 1024 --compiled"),
        ("report", "hydragraph bench report kernels.json step.json --markdown results.md"),
    ],
)
def test_help_teaches_with_an_example(command: str, example: str) -> None:
    assert example in " ".join(bench(command, "--help").stdout.split())
