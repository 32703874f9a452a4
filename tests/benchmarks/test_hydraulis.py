"""The paper's grid on a made-up table of constants: the bound, the rivals by hand, and what is divided by what."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import hydraulis
from benchmarks.published import overlap
from benchmarks.published.llamas import completed, elements, known, simulated, strategy
from benchmarks.published.paper_grid import (
    CELLS,
    SWEEPS,
    Cell,
    Mean,
    Result,
    case_study,
    case_table,
    measured,
    summary,
    sweep_table,
    table,
)
from benchmarks.published.rivals import (
    TABLE_3,
    DeepSpeed,
    HotSpa,
    Megatron,
    best_deepspeed,
    best_hotspa,
    best_megatron,
    bounds_of,
    dealt,
    resharded,
)
from benchmarks.published.workload import fixed_length, mini_batch
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
from tests.thorough import thorough

ENTRY: dict[str, Any] = {
    "name": "llama-7b-a800-80g",
    "model": {"hidden": 1024, "layers": 8, "vocab": 1000},
    "schemes": [
        {"tp": tp, "pp": pp, "a_ms_per_token2": 8e-6 / tp / pp, "b_ms_per_token": 0.1 / tp**0.9 / pp, "c_ms": 10 / pp}
        for tp, pp in ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))
    ],
    "util_len_tokens": {"1": 64, "2": 64, "4": 64, "8": 64},
    "memory": {
        "activation_A": {"1": 38, "2": 39, "4": 42, "8": 48},
        "states_B": 210,
        "alpha": 0.75,
        "gap_bytes": {"node": 0},
        "safety_margin_bytes": 0,
        "device_bytes": 4.2e9,
    },
    "gpus_per_node": 8,
    "hetero_sync_ms": 300,
}
PUBLISHED = Profile.from_constants(ENTRY)
PROFILE = completed(PUBLISHED)
QUANTILES = [16.0, 64.0, 128.0, 512.0, 16_384.0]
CELL = Cell("7b", 8, "web_text", 16_384, 30_000)


def test_what_was_not_published_is_added() -> None:
    assert PROFILE.schemes[1, 1] == PUBLISHED.schemes[1, 2].times(2)
    assert PROFILE.hetero_sync_s == 0.0
    costs = known(PROFILE, 8)
    assert sum(bucket.size for bucket in costs.buckets) == elements(PROFILE) == 8 * 12 * 1024**2 + 2 * 1024 * 1000


def test_a_simulation_without_traffic_is_the_recurrence() -> None:
    schemes = ((4, 1), (2, 2))
    assignment = assign_pipelines(PROFILE.pipelines(schemes), [100, 200, 300, 400, 500])
    costs = known(PROFILE, 8)
    alone = simulated(
        costs, PROFILE, strategy(schemes, PROFILE), assignment, ("pull", "push", "ending", "messages")
    ).seconds
    assert alone == pytest.approx(assignment.seconds, rel=1e-9)
    whole = simulated(costs, PROFILE, strategy(schemes, PROFILE), assignment).seconds
    assert whole > alone


def test_megatron_is_fixed_length_packing_dealt_in_turn() -> None:
    lengths = [300, 200, 700, 500]
    rival = Megatron(PROFILE, 8, (4, 1), 1000, lengths)
    first, second = fixed_length(lengths, 1000)
    assert (first, second) == ([700, 300], [500, 200])
    cost = PROFILE.pipeline((4, 1), 8)
    assert rival.name == "DP2TP4PP1"
    assert rival.ends(lengths) == pytest.approx([cost.micro_batch_seconds(first), cost.micro_batch_seconds(second)])
    assert rival.spent(lengths).computing == max(rival.ends(lengths))
    assignment = dealt([first, second], 2)
    assert assignment.tokens == (((700, 300),), ((500, 200),))


def test_deepspeed_by_hand() -> None:
    rival = DeepSpeed(PROFILE, 8, 4, 1000)
    linear = 2 * PUBLISHED.schemes[1, 2].b * 1000 / 4
    attention = PUBLISHED.schemes[4, 1].a * (700**2 + 300**2)
    # 8 all-to-alls per layer of a quarter of 1,000 tokens' hidden states; three quarters leave each device
    exchanged = 8 * 8 * (1000 / 4 * 1024 * 2 * 3 / 4 / 200e9 + 5e-6)
    expected = linear + attention + 2 * PUBLISHED.schemes[1, 2].c + exchanged
    assert rival.micro_batch([700, 300]) == pytest.approx(expected)
    again = DeepSpeed(PROFILE, 8, 4, 1000, recompute=True)
    assert again.name == "DP2SP4+AC"
    computing = linear + attention + 2 * PUBLISHED.schemes[1, 2].c
    assert again.micro_batch([700, 300]) == pytest.approx(4 / 3 * computing + 12 / 8 * exchanged)
    spent = rival.spent([1000, 900, 800])  # two rounds of two groups: the slowest of each counts
    assert spent.computing == pytest.approx(rival.micro_batch([1000]) + rival.micro_batch([800]))
    traffic = 3 * 2 * elements(PROFILE) * 7 / 8 / 200e9
    assert spent.unhidden == pytest.approx(2 * traffic)
    assert spent.moving == pytest.approx(sum(max(0.0, traffic - rival.micro_batch([n])) for n in (1000, 800)))


def test_hotspa_runs_a_strategy_for_each_length_group() -> None:
    lengths = [9000, 100, 200, 300]
    rival = HotSpa(PROFILE, 8, ((4, 2), (2, 1)), 16_384, [lengths])
    long, short = rival.phases
    assert (long.above, long.upto, long.scheme) == (4096, 16_384, (4, 2))
    assert (short.above, short.upto, short.scheme) == (0, 4096, (2, 1))
    spent = rival.spent(lengths)
    alone = PROFILE.pipeline((4, 2), 8).micro_batch_seconds([9000]) * 2
    together = PROFILE.pipeline((2, 1), 8).micro_batch_seconds([300, 200, 100])
    assert spent.computing == pytest.approx(alone + together)
    assert spent.unhidden == 2.0 > spent.moving
    one = rival.spent([100, 200])
    assert one.moving < spent.moving
    assert one.unhidden == one.moving  # a single strategy does not switch
    assert bounds_of(16_384) == [4096, 16_384]
    assert bounds_of(32_768) == [4096, 16_384, 32_768]


def test_sharding_again_takes_time_in_proportion_to_the_weights() -> None:
    wider = {**ENTRY, "name": "wider", "model": {**ENTRY["model"], "layers": 16}}
    small, large = (resharded(p, 8, (4, 1), (2, 2)) for p in (PROFILE, completed(Profile.from_constants(wider))))
    assert large == pytest.approx(2 * small, rel=0.1)
    assert small > 0


def test_table_3_is_on_the_devices_and_within_the_grid() -> None:
    assert len(CELLS) == len(set(CELLS)) == 36
    assert {(c.model, c.devices, c.context) for c in CELLS} == set(TABLE_3)
    for (_, devices, context), row in TABLE_3.items():
        assert devices % row.sp == 0
        assert len(row.hotspa) == len(bounds_of(context))
        assert all(devices % (tp * pp) == 0 for tp, pp in (row.megatron, *row.hotspa))
        assert row.hotspa[0] == row.megatron
    assert {c.context for c in SWEEPS["context"]} == {16_384, 32_768, 65_536, 131_072}


def test_ratios_name_both_sides() -> None:
    lines = {"a": (5, 6, 6), "b": (4, 5, 5), "c": (3, 4, 4), "d": (2, 3, 3), "Megatron": (6, 7, 7)}
    lines["DeepSpeed"] = (5, 6, 9)
    result = Result(CELLS[0], {n: Mean(*map(float, v)) for n, v in lines.items()}, {"b": "x", "c": "y"}, {"s": 3}, 2.5)
    assert (result.gain("computing"), result.gain("whole")) == (2.5, 2.0)
    assert result.gain("most") == pytest.approx(7 / 3)
    assert result.over("b") == pytest.approx(5 / 3)
    assert result.at_most == pytest.approx(6 / 2.5)
    told = "\n".join(summary([result]))
    assert "traffic at its least: 2.00 to 2.00" in told
    assert "(b) the best homogeneous strategy with our assignment / choosing every iteration: 1.67 to 1.67" in told


def test_tuned_rivals_take_the_context() -> None:
    tuning = [mini_batch(QUANTILES, 16_384, 30_000, np.random.default_rng(0))]
    megatron = best_megatron(PROFILE, 8, 16_384, tuning)
    deepspeed = best_deepspeed(PROFILE, 8, 16_384, tuning)
    hotspa = best_hotspa(PROFILE, 8, 16_384, tuning)
    assert deepspeed is not None
    assert all(rival.spent(tuning[0]).whole > 0 for rival in (megatron, deepspeed, hotspa))
    with pytest.raises(ValueError, match="no published scheme takes"):
        best_megatron(PROFILE, 8, 10**7, tuning)


@thorough
def test_a_cell_runs_through(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(CELL, PUBLISHED, QUANTILES, 2)
    ours = result.lines["d"]
    assert result.bound <= ours.computing * (1 + 1e-9)
    assert ours.whole <= result.lines["c"].whole * 1.001
    assert result.lines["c"].whole <= result.lines["b"].whole * 1.02  # tuned on other mini-batches
    assert sum(result.chosen.values()) == 2
    console = Console(width=220, file=io.StringIO(), record=True)
    console.print(table([result]), sweep_table("tokens", [result]))
    assert "30K tokens" in console.export_text()
    for module in ("benchmarks.published.paper_grid", "benchmarks.published.overlap"):
        monkeypatch.setattr(f"{module}.CASE", CELL)
    rows = case_study(PUBLISHED, QUANTILES, 2)
    assert all(row.simulated >= row.computing * (1 - 1e-9) for row in rows)
    console.print(case_table(rows))
    found = overlap.found(PUBLISHED, QUANTILES, 1)
    for one in found.values():
        assert -1e-9 <= one.beside <= one.apart + 1e-9
        assert one.propagation > 0
    console.print(overlap.table(found, 1))


@thorough
def test_the_command_prints_a_slice(tmp_path: Path) -> None:
    entries = [{**ENTRY, "name": f"llama-{model}-a800-80g"} for model in ("7b", "13b", "32b")]
    (tmp_path / "hydraulis_profiles.json").write_text(json.dumps({"profiles": entries}))
    distributions = {"web_text": QUANTILES, "python_code": QUANTILES}
    (tmp_path / "length_distributions.json").write_text(json.dumps(distributions))
    command = [sys.executable, "-m", "benchmarks.hydraulis", "--data", str(tmp_path), "--models", "7b"]
    command += ["--cells", "1", "--iterations", "2", "--processes", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "best of Megatron, DeepSpeed, HotSPa (Table 3) / choosing every iteration" in done.stdout


def test_without_data_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hydraulis", "--data", str(tmp_path)])
    hydraulis.main()
    assert capsys.readouterr().out.startswith("skipped: ")
